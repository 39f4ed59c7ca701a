#include "engine/negotiate/process_sets.h"

#include <numeric>
#include <utility>

#include "base/clock.h"
#include "engine/lifecycle/hosts_subject.h"

namespace lightcc {

ProcessSets::ProcessSets(const GroupResources& shared, Inbox& inbox) : shared_(shared), inbox_(inbox) {
  std::vector<int> all(size_t(shared.peers.size()));
  std::iota(all.begin(), all.end(), 0);
  int id;
  add(std::move(all), &id);
}

GroupEngine* ProcessSets::add(std::vector<int> ranks, int* id) {
  Peers& peers = shared_.peers;
  const auto group = shared_.surroundings.groups.add(std::move(ranks), peers.rank(), peers.topology());
  *id = group->id();
  if (!group->contains(peers.rank())) return nullptr;
  auto tuned = CacheFile::of(shared_.config.cache_dir, hosts_subject(peers, shared_.config));
  auto engine = std::make_unique<GroupEngine>(shared_, group, std::move(tuned));
  return (engines_[*id] = std::move(engine)).get();
}

// The members, or the id of the group to remove, came as the request's shape: so that ranks agree on them.
void ProcessSets::change(Request& request) {
  const Shape& numbers = request.what.tensors[0].shape;
  if (request.what.kind == Kind::add_group) {
    GroupEngine* added = add({numbers.begin(), numbers.end()}, &request.changed_group);
    if (!added) return;
    tell_who_has_left(*added);
    if (!join_) return;
    ++join_parts_;
    added->submit(join_);
    return;
  }
  const int id = int(numbers[0]);
  if (GroupEngine* removed = find(id)) {
    removed->fail_all(Code::invalid_argument, "its process set was removed");
    removed->end_nccl(now_ns() + NcclLaunches::kQueuedNs);
    shared_.launches.forget(id);
  }
  engines_.erase(id);
  shared_.peers.reset_group(id);
  shared_.surroundings.groups.remove(id);
  inbox_.forget_group(id);
  request.changed_group = id;
}

// Ranks of this host may have left, and been seen to, before the set was there. Others say so on its own links.
void ProcessSets::tell_who_has_left(GroupEngine& added) {
  const LeftMembers& left = world().negotiator().left();
  for (const int rank : added.group().ranks())
    if (shared_.peers.is_local(rank) && !left.why(rank).empty()) added.rank_left(rank, left.why(rank));
}

std::string ProcessSets::plans_text() {
  std::string text;
  for (auto& [id, engine] : engines_)
    if (const std::string plans = engine->negotiator().plans_text(); !plans.empty())
      text += "process set " + std::to_string(id) + "\n" + plans;
  return text;
}

// The coordinator of another group than the world's asks for it when it first waits.
void ProcessSets::await_turn(const Group& group) {
  if (world().control_plane().cut_off())
    throw Error(Code::shut_down, "process set " + std::to_string(group.id()) + " cannot use NCCL any more: rank " +
                                     std::to_string(world().group().rank(0)) + ", which orders its launches, or a " +
                                     "rank on the way there, has left");
  if (group.index() == 0 && shared_.launches.ask(group.id()))
    world().negotiator().send_up(
        LaunchRequest{shared_.peers.rank(), group.id(), {group.ranks().begin(), group.ranks().end()}});
}

void ProcessSets::fail_all(Code code, const std::string& text) {
  for (auto& [id, engine] : engines_) engine->fail_all(code, text);
}

void ProcessSets::end_nccl(uint64_t deadline_ns) {
  for (auto& [id, engine] : engines_) engine->end_nccl(deadline_ns);
}

void ProcessSets::join(const RequestPtr& request) {
  join_ = request;
  join_parts_ = int(engines_.size());
  for (auto& [id, engine] : engines_) engine->submit(request);
}

ProcessSets::Join ProcessSets::join_ended(const RequestPtr& request, Code code, bool over) {
  if (request->finished.load(std::memory_order_relaxed)) return Join::goes_on;  // it failed as a whole before
  const bool done_here = code == Code::ok || code == Code::invalid_argument;  // that is, its process set was removed
  if (request == join_ && done_here && --join_parts_ > 0) return Join::goes_on;
  if (request == join_ && !done_here && !over) return Join::fails;
  join_.reset();
  inbox_.end_join(code == Code::ok);
  return Join::over;
}

}  // namespace lightcc
