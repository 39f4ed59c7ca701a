#include "engine/negotiate/deadlock_watch.h"

#include <utility>

#include "base/log.h"
#include "engine/negotiate/blocked_text.h"
#include "engine/negotiate/control/wait_cycle.h"

namespace lightcc {
namespace {

const std::string kProcessSetsDiffer = "ranks disagree on the process set: ";

}  // namespace

DeadlockWatch::DeadlockWatch(const GroupResources& shared, ProcessSets& sets, Inbox& inbox)
    : shared_(shared), sets_(sets), inbox_(inbox), detector_(shared.surroundings.deadlocks),
      state_(shared.peers.rank()) {}

// A rank that belongs to one process set only can be in no deadlock between sets, but in one between operations.
void DeadlockWatch::note_blocked(const Request& request, uint64_t now_ns) {
  GroupEngine* group_engine = sets_.find(request.group);
  if (!group_engine || !group_engine->announced(request.what.kind, request.automatic, request.key)) return;
  state_.block(request, now_ns, sets_.size() > 1);
  const Config& config = shared_.config;
  if (config.stall_check && config.deadlock_s > 0) state_.waits(request, now_ns, uint64_t(config.deadlock_s * 1e9));
}

bool DeadlockWatch::report() {
  GroupEngine& world = sets_.world();
  bool moved = false;
  if (auto report = state_.take_report(); report && !world.control_plane().cut_off())
    world.negotiator().send_up(*report), moved = true;
  if (GroupEngine* own = sets_.find(state_.group()); state_.long_wait_due() && own && own->report_blocked(state_.key()))
    state_.long_wait_said(), moved = true;
  for (const DeadlockProbe& one : state_.take_probes()) answer(one), moved = true;
  return moved;
}

bool DeadlockWatch::tell() {
  bool moved = false;
  for (const DeadlockProbe& one : detector_.take_messages()) sets_.world().negotiator().send_down(one), moved = true;
  for (const std::vector<int>& cycle : detector_.take_cycles()) {
    shared_.counters.add(Counters::stall_warnings);
    std::string waits;
    for (size_t i = 0; i < cycle.size(); ++i)
      waits += (i ? "; " : "") + shared_.peers.name(cycle[i]) + " waits in " +
               blocked_text(shared_.surroundings, cycle[i]) + " for " +
               shared_.peers.name(cycle[(i + 1) % cycle.size()]);
    log(Level::warning, deadlock_warning("", waits));
  }
  return moved;
}

void DeadlockWatch::answer(const DeadlockProbe& probe) {
  if (probe.other < 0) {
    if (state_.blocked(probe.state)) state_.ask_again();
    return;
  }
  if (probe.confirmed) {
    const auto& confirmed = state_.confirmation();
    if (confirmed && confirmed->probe.other == probe.other && confirmed->probe.group == probe.group) declare_absent();
    return;
  }
  if (!state_.blocked(probe.state)) return;  // it has gone on, and has reported it
  GroupEngine *own = sets_.find(state_.group()), *other = sets_.find(probe.group);
  const bool deadlocked = own != other && own && other && own->group().contains(probe.other) &&
                          other->group().contains(probe.other) &&
                          !other->announced(state_.kind(), state_.automatic(), state_.key());
  if (deadlocked) state_.confirm(probe);
  sets_.world().negotiator().send_up(
      DeadlockReply{shared_.peers.rank(), probe.state, probe.other, probe.group, deadlocked});
}

// Both have confirmed it: this rank tells the other's process set that it will not come, and the other does likewise.
// Each does so before anything that it does afterwards, so nobody takes its next request for this one.
void DeadlockWatch::declare_absent() {
  const BlockedState::Confirmation confirmed = *std::exchange(state_.confirmation(), std::nullopt);
  GroupEngine* other = sets_.find(confirmed.probe.group);
  if (!other || other->announced(confirmed.report.kind, confirmed.automatic, confirmed.report.key)) return;
  const auto side = [&](int rank, int id) {
    return "rank " + std::to_string(rank) + " gave it to " + process_set_text(id, shared_.surroundings.groups.find(id));
  };
  const int rank = shared_.peers.rank();
  std::string ours = side(rank, confirmed.report.group), theirs = side(confirmed.probe.other, confirmed.probe.group);
  if (confirmed.probe.other < rank) std::swap(ours, theirs);
  inbox_.skip_name(confirmed.probe.group, confirmed.probe.key);  // no effect, which would come after the caller goes on
  other->negotiator().send_up(MembersAbsent{confirmed.probe.key, kProcessSetsDiffer + ours + ", " + theirs,
                                            {other->group().index()}});
}

// The request that it is about may fail before this rank is told why.
void DeadlockWatch::finished(const Request& request, Code code, const std::string& text) {
  if (auto& confirmed = state_.confirmation(); confirmed && confirmed->is_of(request)) {
    if (code == Code::mismatch && text.find(kProcessSetsDiffer) != std::string::npos)
      declare_absent();
    else
      confirmed.reset();
  }
  state_.unblock();
}

}  // namespace lightcc
