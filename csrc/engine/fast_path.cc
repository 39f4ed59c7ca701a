#include "engine/fast_path.h"

#include <cstring>

#include "base/clock.h"
#include "device/device.h"

namespace lightcc {
namespace {

static_assert(sizeof(ArenaOffsets) <= FastPathSlot::kInlineBytes);
static_assert(SharedBackend::kFlatBytes == FastPathSlot::kEagerBytes);
constexpr uint64_t kWhileNs = 50'000;
constexpr uint64_t kRefusal = 1;  // the lowest bit of a slot's word; the turn stands above it

}  // namespace

FastPath::FastPath(LocalRanks& local_ranks, const Group& group, SharedBackend& shared)
    : local_ranks_(local_ranks),
      group_(group),
      shared_(shared),
      left_(size_t(group.size())),
      inputs_(size_t(group.size())) {
  for (int member = 0; member < group.size(); ++member)
    for (int slot : {0, 1}) slots_.push_back(&local_ranks.fast_path_slot(group.id(), group.local_index(member), slot));
  call_.kind = Kind::allreduce;
  call_.index = group.index();
  call_.size = group.size();
}

bool FastPath::has_written(int member, uint64_t turn) const {
  return slot(member, turn).word.load(std::memory_order_acquire) >> 1 == turn;
}
bool FastPath::refused(int member) const {
  const FastPathSlot& theirs = slot(member, turn_);
  return theirs.word.load(std::memory_order_relaxed) & kRefusal || theirs.hash != hash_;
}

bool FastPath::ready() {
  if (active()) return false;
  for (int i = 0; i < group_.size(); ++i)
    if (!has_written(i, turn_)) return false;
  return true;
}

void FastPath::write(bool refusal) {
  slot(group_.index(), turn_).word.store(turn_ << 1 | (refusal ? kRefusal : 0), std::memory_order_release);
  for (int rank : group_.local_indices())
    if (rank != local_ranks_.rank()) local_ranks_.mark(rank);
}

void FastPath::begin(uint64_t hash) {
  hash_ = hash;
  bytes_ = size_t(call_.count) * size_of(call_.dtype);
  ++turn_;
  seen_ = 0;
  awaited_ns_ = 0;
  state_ = State::waiting;
  FastPathSlot& own = slot(group_.index(), turn_);
  own.hash = hash;
  if (bytes_ > FastPathSlot::kEagerBytes) {
    new (own.inline_data) ArenaOffsets(shared_.offsets_of(call_));
  } else {
    stage(bytes_ <= FastPathSlot::kInlineBytes ? own.inline_data : own.eager, call_.input, bytes_);
  }
  write(false);
}

FastPath::State FastPath::finish(State state) {
  state_ = State::idle;
  work_.reset();
  return state;
}

FastPath::State FastPath::step(bool* moved) {
  if (state_ == State::waiting) {
    for (; seen_ < group_.size(); ++seen_) {
      if (seen_ == group_.index()) continue;
      if (!has_written(seen_, turn_)) return left_[size_t(seen_)] ? finish(State::refused) : state_;
      if (refused(seen_)) return finish(State::refused);
    }
    if (bytes_ <= FastPathSlot::kEagerBytes) return add_up(), finish(State::done);
    std::vector<ArenaOffsets> offsets;
    for (int i = 0; i < group_.size(); ++i)
      offsets.push_back(*reinterpret_cast<ArenaOffsets*>(slot(i, turn_).inline_data));
    work_ = shared_.start(call_, std::move(offsets));
    state_ = State::running;
  }
  if (state_ != State::running) return state_;
  const bool stepped = work_->step();
  if (moved) *moved = stepped;
  return work_->done() ? finish(State::done) : state_;
}

void FastPath::add_up() {  // in rank order, so that all ranks have the same bits
  for (int i = 0; i < group_.size(); ++i) {
    const FastPathSlot& theirs = slot(i, turn_);
    inputs_[size_t(i)] = i == group_.index()                    ? call_.input
                         : bytes_ <= FastPathSlot::kInlineBytes ? theirs.inline_data
                                                                : theirs.eager;
  }
  void* out = call_.output;
  reduce({call_.dtype, call_.op, call_.pre, call_.post}, {&out, 1}, inputs_, size_t(call_.count));
}

bool FastPath::refuse_if_awaited(bool at_once) {
  bool awaited = false;
  for (int i = 0; i < group_.size() && !awaited; ++i) awaited = i != group_.index() && has_written(i, turn_ + 1);
  if (!awaited) return false;
  if (awaited_ns_ == 0) awaited_ns_ = now_ns();
  if (!at_once && now_ns() - awaited_ns_ < kWhileNs) return false;
  ++turn_;
  awaited_ns_ = 0;
  write(true);
  return true;
}

std::vector<int> FastPath::missing() const {
  std::vector<int> missing;
  for (int i = 0; i < group_.size(); ++i)
    if (i != group_.index() && !has_written(i, turn_)) missing.push_back(i);
  return missing;
}

}  // namespace lightcc
