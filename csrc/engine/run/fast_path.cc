#include "engine/run/fast_path.h"

#include "base/clock.h"
#include "device/device.h"

namespace lightcc {

FastPath::FastPath(const Group& group, size_t eager_bytes)
    : group_(group), eager_bytes_(eager_bytes), left_(size_t(group.size())), inputs_(size_t(group.size())) {
  call_.kind = Kind::allreduce;
  call_.index = group.index();
  call_.size = group.size();
}

bool FastPath::ready() const {
  if (active()) return false;
  for (int i = 0; i < group_.size(); ++i)
    if (i != group_.index() && !has_written(i, turn_)) return false;
  return true;
}

void FastPath::begin(uint64_t hash) {
  hash_ = hash;
  bytes_ = size_t(call_.count) * size_of(call_.dtype);
  ++turn_;
  seen_ = 0;
  awaited_ns_ = 0;
  state_ = State::waiting;
  write(turn_, hash, &call_, is_eager());
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
      const Slot theirs = slot(seen_, turn_, bytes_);
      if (theirs.refusal || theirs.hash != hash_) return finish(State::refused);
    }
    if (is_eager()) return add_up(), finish(State::done);
    work_ = start(call_, turn_);
    state_ = State::running;
  }
  if (state_ != State::running) return state_;
  const bool stepped = work_->step();
  if (moved) *moved = stepped;
  return work_->done() ? finish(State::done) : state_;
}

void FastPath::add_up() {  // in rank order, so that all ranks have the same bits
  for (int i = 0; i < group_.size(); ++i)
    inputs_[size_t(i)] = i == group_.index() ? call_.input : slot(i, turn_, bytes_).data;
  void* out = call_.output;
  reduce({call_.dtype, call_.op, call_.pre, call_.post}, {&out, 1}, inputs_, size_t(call_.count));
}

bool FastPath::refuse_if_awaited(uint64_t patience_ns) {
  bool awaited = false;
  for (int i = 0; i < group_.size() && !awaited; ++i) awaited = i != group_.index() && has_written(i, turn_ + 1);
  if (!awaited) return false;
  if (awaited_ns_ == 0) awaited_ns_ = now_ns();
  if (patience_ns > 0 && now_ns() - awaited_ns_ < patience_ns) return false;
  ++turn_;
  awaited_ns_ = 0;
  write(turn_, 0, nullptr, false);
  return true;
}

std::vector<int> FastPath::missing() const {
  std::vector<int> missing;
  for (int i = 0; i < group_.size(); ++i)
    if (i != group_.index() && !has_written(i, turn_)) missing.push_back(i);
  return missing;
}

}  // namespace lightcc
