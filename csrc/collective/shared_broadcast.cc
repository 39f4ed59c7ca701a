#include "collective/shared_broadcast.h"

#include <algorithm>

#include "collective/copy_collective.h"
#include "device/device.h"

namespace lightcc {

SharedBroadcast::SharedBroadcast(SharedBackend& backend, const Collective& c)
    : backend_(backend), c_(c), exchange_(backend, backend.offsets_of(c)), seen_(size_t(c.size)) {
  const size_t bytes = size_t(c.count) * size_of(c.dtype);
  const auto border = [&](int i) {  // on lines, so that no two ranks write one
    return i == c.size ? bytes : std::min(bytes, round_up(bytes * size_t(i) / size_t(c.size)));
  };
  at_ = border(c.index), end_ = border(c.index + 1);
}

bool SharedBroadcast::step() {
  if (copies_) return copies_->step();
  if (!agreed_) return agree();
  if (at_ < end_) return copy_block();
  return tell();
}

bool SharedBroadcast::agree() {
  const bool moved = exchange_.step();
  waiting_for_ = exchange_.waiting_for();
  if (!exchange_.done()) return moved;
  agreed_ = true;
  if (!std::ranges::all_of(exchange_.offsets(), [](const ArenaOffsets& of) { return of.output >= 0; }))
    copies_ = std::make_unique<CopyCollective>(backend_, c_);
  return true;
}

bool SharedBroadcast::copy_block() {
  const size_t n = std::min(LocalRanks::kRecordBytes, end_ - at_);
  const auto data_of = [&](int member) {
    return backend_.local_ranks_.base(backend_.members_[size_t(member)]) + exchange_.offsets()[size_t(member)].output;
  };
  const std::byte* from = data_of(c_.root) + at_;
  for (int v = 0; v < c_.size; ++v)
    if (v != c_.root) copy(data_of(v) + at_, from, n);
  at_ += n;
  return true;
}

// That this rank's part is with all, and that it has heard so of theirs.
bool SharedBroadcast::tell() {
  bool moved = false;
  if (!told_) {
    if (!backend_.reserve(1)) return waiting_for_ = backend_.slowest_reader(), false;
    backend_.commit(1);
    told_ = moved = true;
  }
  for (int v = 0; v < c_.size; ++v) {
    if (v == c_.index || seen_[size_t(v)]) continue;
    waiting_for_ = v;
    if (!backend_.peek(v, 1)) return moved;
    backend_.consume(v, 1);
    seen_[size_t(v)] = moved = true;
  }
  done_ = true;
  return true;
}

}  // namespace lightcc
