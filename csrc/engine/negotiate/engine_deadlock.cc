// The engine's part in finding deadlocks: between process sets (control/deadlock_detector.h) what it reports, what it
// answers, and what it does when both ranks have confirmed one; inside one (Coordinator::blocked) what it reports.

#include "base/log.h"
#include "engine/negotiate/blocked_text.h"
#include "engine/negotiate/control/wait_cycle.h"
#include "engine/engine_impl.h"

namespace lightcc {
namespace {

const std::string kProcessSetsDiffer = "ranks disagree on the process set: ";

}  // namespace

// A rank that belongs to one process set only can be in no deadlock between sets, but in one between operations.
void Engine::Impl::report_if_blocked(const Request& request, uint64_t now) {
  if (request.what.kind == Kind::join || !progress_lock_.try_lock()) return;
  auto group_engine = group_engines_.find(request.group);
  if (group_engine != group_engines_.end() &&
      group_engine->second->announced(request.what.kind, request.automatic, request.key)) {
    blocked_state_.block(request, now, group_engines_.size() > 1);
    if (config_.stall_check && config_.deadlock_s > 0)
      blocked_state_.waits(request, now, uint64_t(config_.deadlock_s * 1e9));
  }
  progress_lock_.unlock();
}

bool Engine::Impl::detect_deadlocks() {
  progress_lock_.assert_held();
  GroupEngine& world = *group_engines_.at(0);
  bool moved = false;
  if (auto report = blocked_state_.take_report(); report && !world.control_plane().cut_off())
    world.send_up(*report), moved = true;
  if (auto own = group_engines_.find(blocked_state_.group()); blocked_state_.long_wait_due() &&
                                                              own != group_engines_.end() &&
                                                              own->second->report_blocked(blocked_state_.key()))
    blocked_state_.long_wait_said(), moved = true;
  for (const DeadlockProbe& one : blocked_state_.take_probes()) answer(one), moved = true;
  carry_out_effects();  // the detector may be here
  for (const DeadlockProbe& one : deadlock_detector_.take_messages())
    world.send_down(one), moved = true;
  for (const std::vector<int>& cycle : deadlock_detector_.take_cycles()) {
    counters_.add(Counters::stall_warnings);
    std::string waits;
    for (size_t i = 0; i < cycle.size(); ++i)
      waits += (i ? "; " : "") + peers_->name(cycle[i]) + " waits in " + blocked_text(surroundings_, cycle[i]) +
               " for " + peers_->name(cycle[(i + 1) % cycle.size()]);
    log(Level::warning, deadlock_warning("", waits));
  }
  return moved;
}

void Engine::Impl::answer(const DeadlockProbe& probe) {
  progress_lock_.assert_held();
  if (probe.other < 0) {
    if (blocked_state_.blocked(probe.state)) blocked_state_.ask_again();
    return;
  }
  if (probe.confirmed) {
    auto& confirmed = blocked_state_.confirmation();
    if (confirmed && confirmed->probe.other == probe.other && confirmed->probe.group == probe.group) declare_absent();
    return;
  }
  if (!blocked_state_.blocked(probe.state)) return;  // it has gone on, and has reported it
  auto own = group_engines_.find(blocked_state_.group()), other = group_engines_.find(probe.group);
  const bool deadlocked =
      own != other && own != group_engines_.end() && other != group_engines_.end() &&
      own->second->group().contains(probe.other) && other->second->group().contains(probe.other) &&
      !other->second->announced(blocked_state_.kind(), blocked_state_.automatic(), blocked_state_.key());
  if (deadlocked) blocked_state_.confirm(probe);
  group_engines_.at(0)->send_up(
      DeadlockReply{world_.rank, probe.state, probe.other, probe.group, deadlocked});
}

// Both have confirmed it: this rank tells the other's process set that it will not come, and the other does likewise.
// Each does so before anything that it does afterwards, so nobody takes its next request for this one.
void Engine::Impl::declare_absent() {
  progress_lock_.assert_held();
  const BlockedState::Confirmation confirmed = *std::exchange(blocked_state_.confirmation(), std::nullopt);
  auto other = group_engines_.find(confirmed.probe.group);
  if (other == group_engines_.end() ||
      other->second->announced(confirmed.report.kind, confirmed.automatic, confirmed.report.key))
    return;
  auto side = [&](int rank, int id) {
    return "rank " + std::to_string(rank) + " gave it to " + process_set_text(id, group(id));
  };
  std::string ours = side(world_.rank, confirmed.report.group),
              theirs = side(confirmed.probe.other, confirmed.probe.group);
  if (confirmed.probe.other < world_.rank) std::swap(ours, theirs);
  inbox_.skip_name(confirmed.probe.group, confirmed.probe.key);
  other->second->declare_absent(confirmed.probe.key, kProcessSetsDiffer + ours + ", " + theirs);
}

// The request that it is about may fail before this rank is told why.
void Engine::Impl::finish_deadlock(const Request& request, Code code, const std::string& text) {
  progress_lock_.assert_held();
  auto& confirmed = blocked_state_.confirmation();
  if (!confirmed || !confirmed->is_of(request)) return;
  if (code == Code::mismatch && text.find(kProcessSetsDiffer) != std::string::npos) return declare_absent();
  confirmed.reset();
}

}  // namespace lightcc
