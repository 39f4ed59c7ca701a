#include "engine/run/group_fast_path.h"

#include <utility>

#include "engine/negotiate/control/hold.h"

namespace lightcc {

GroupFastPath::GroupFastPath(Peers& peers, const Group& group, const Config& config, const GroupBackends& backends,
                             RemoteFastPath::Send send)
    : peers_(peers), group_(group), backends_(backends), fixes_ways_(!config.select.empty() || config.autotune) {
  if (SharedBackend* shared = backends.shared()) {
    path_ = std::make_unique<SharedFastPath>(peers.local_ranks(), group, *shared);
  } else if (group.size() == 2) {
    auto remote = std::make_unique<RemoteFastPath>(group, std::move(send), [this](const Collective& call) {
      const Row& row = backends_.selector().choose(call);
      return row.backend->start(call, row.algorithm);
    });
    remote_ = remote.get();
    path_ = std::move(remote);
  }
}

void GroupFastPath::note_facts(FastPathFacts* facts) const {
  facts->has_fast_path = path_ != nullptr;
  facts->is_idle = path_ && !request_ && path_->ready();
  facts->is_between_hosts = is_between_hosts();
  facts->fixes_ways = fixes_ways_;
}

bool GroupFastPath::prefers_shared(const Collective& call) const {
  return backends_.selector().choose(call).backend == backends_.shared();
}

bool GroupFastPath::step(bool has_announced, bool runs_batch, Ended* ended) {
  if (!path_) return false;
  if (!path_->active())
    return path_->refuse_if_awaited(hold::refusal_ns(has_announced, runs_batch, is_between_hosts()));
  bool moved = false;
  const FastPath::State state = path_->step(&moved);
  if (path_->active()) return moved;
  *ended = {std::move(request_), state == FastPath::State::done};
  return true;
}

void GroupFastPath::receive(std::string slot, int member) {
  if (!remote_)
    throw Error(Code::internal, "rank " + std::to_string(group_.rank(member)) +
                                    " sent a call to a group that has no fast path between hosts");
  remote_->receive(std::move(slot));
}

RequestPtr GroupFastPath::drop() {
  if (path_) path_->drop();
  return std::move(request_);
}

void GroupFastPath::remind() {
  for (int member : missing()) {
    peers_.wake_urgently(group_.rank(member));
    if (remote_) remote_->remind();
  }
}

}  // namespace lightcc
