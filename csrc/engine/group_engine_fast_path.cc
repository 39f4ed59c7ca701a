// A group engine's part of the fast path: which calls may take it, and what this rank does while others wait on it.
#include <utility>

#include "engine/group_engine.h"

namespace lightcc {
namespace {

// How long a rank that waits on the fast path is not refused by one that is busy, and by an idle one on another host,
// which may come late. What is refused is negotiated, and then others know what it waits for.
constexpr uint64_t kBusyPatienceNs = 50'000, kIdlePatienceNs = 100'000'000;

}  // namespace

FastPath* GroupEngine::idle_fast_path() {
  progress_lock_.assert_held();
  return fast_path_ && idle() && first_left_.empty() && fast_path_->ready() ? fast_path_.get() : nullptr;
}

// Between hosts a small call has the bits that it has by negotiation, as only a factor before the sum is rounded in
// other places. Of ways that are forced or tuned each call is to be one.
bool GroupEngine::can_take_fast_path(const Collective& c) const {
  if (!remote_fast_path_) return selector_.choose(c).backend == shared_;
  return c.pre == 1.0 && !is_adasum(c) && config_.select.empty() && !config_.autotune;
}

bool GroupEngine::receive_slots() {
  progress_lock_.assert_held();
  return remote_fast_path_ && (peers_.step() | step_control_plane());
}

void GroupEngine::receive(ReceivedSlot& slot) {
  if (!remote_fast_path_)
    throw Error(Code::internal, "rank " + std::to_string(group_->rank(slot.member)) + " sent a call to a group that has no "
                                    "fast path between hosts");
  remote_fast_path_->receive(std::move(slot.bytes));
}

bool GroupEngine::step_fast_path() {
  if (!fast_path_) return false;
  if (!fast_path_->active()) {
    const bool idle_remote = remote_fast_path_ && batches_in_flight() == 0;
    return fast_path_->refuse_if_awaited(!pending_.empty() ? 0 : idle_remote ? kIdlePatienceNs : kBusyPatienceNs);
  }
  bool moved = false;
  FastPath::State state = fast_path_->step(&moved);
  if (fast_path_->active()) return moved;
  RequestPtr request = std::move(fast_path_request_);
  if (state != FastPath::State::done) return submit(request), true;
  counters_.count(Counters::fast_path);
  finish(request, Code::ok);
  return true;
}

}  // namespace lightcc
