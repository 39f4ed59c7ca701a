#include "engine/run/remote_fast_path.h"

#include <utility>

#include "base/types.h"

namespace lightcc {

RemoteFastPath::RemoteFastPath(const Group& group, Send send, Start start)
    : FastPath(group, kEagerBytes), send_(std::move(send)), start_(std::move(start)) {
  if (group.size() != 2) throw Error(Code::internal, "a fast path between hosts is for two members");
}

void RemoteFastPath::receive(std::string bytes) {
  const CallSlot slot = call_slot(bytes).value();
  if (slot.turn == received_ && received_ > 0) return;  // a reminder
  if (slot.turn != received_ + 1 || slot.turn > own_.turn + 1 || bytes.size() > sizeof slot + kEagerBytes)
    throw Error(Code::internal, "rank " + std::to_string(group_.rank(1 - group_.index())) +
                                    " sent a call out of its turn");
  received_ = slot.turn;
  slots_[received_ % 2] = std::move(bytes);
}

void RemoteFastPath::remind() { send_(encode(own_)); }

bool RemoteFastPath::has_written(int, uint64_t turn) const { return received_ >= turn; }

// A call whose data are not as many as those of a call of this hash is a fault of the other end, and is refused.
FastPath::Slot RemoteFastPath::slot(int, uint64_t turn, size_t bytes) const {
  const std::string& theirs = slots_[turn % 2];
  const CallSlot slot = call_slot(theirs).value();
  const size_t expected = bytes <= kEagerBytes ? bytes : 0;
  if (!slot.refusal && theirs.size() != sizeof slot + expected) return {true, slot.hash, nullptr};
  return {slot.refusal != 0, slot.hash, theirs.data() + sizeof slot};
}

void RemoteFastPath::write(uint64_t turn, uint64_t hash, const Collective* call, bool eager) {
  own_ = {};
  own_.refusal = !call;
  own_.turn = turn;
  own_.hash = hash;
  std::string_view data;
  if (eager) data = {static_cast<const char*>(call->input), size_t(call->count) * size_of(call->dtype)};
  send_(encode(own_, data));
}

std::unique_ptr<Work> RemoteFastPath::start(const Collective& call, uint64_t) { return start_(call); }

}  // namespace lightcc
