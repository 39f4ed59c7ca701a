#include "engine/express.h"

#include <cstring>

#include "base/clock.h"
#include "device/device.h"

namespace lightcc {
namespace {

static_assert(sizeof(Places) <= Sign::kRoom);
static_assert(SharedBackend::kFlatBytes == Sign::kEagerBytes);
constexpr uint64_t kWhileNs = 50'000;
constexpr uint64_t kRefusal = 1;  // the lowest bit of a sign's word; the turn stands above it

}  // namespace

Express::Express(Host& host, int group, const Members& members, SharedBackend& shared)
    : host_(host), group_(group), members_(members), shared_(shared), gone_(members.ranks.size()),
      inputs_(members.ranks.size()) {}

Sign& Express::sign(int member, uint64_t turn) const {
  return host_.sign(group_, members_.ranks[size_t(member)], int(turn % 2));
}
bool Express::has_signed(int member, uint64_t turn) const {
  return sign(member, turn).word.load(std::memory_order_acquire) >> 1 == turn;
}
bool Express::refused(int member) const {
  const Sign& theirs = sign(member, turn_);
  return theirs.word.load(std::memory_order_relaxed) & kRefusal || theirs.hash != hash_;
}

bool Express::ready() {
  if (active()) return false;
  for (int i = 0; i < members_.size(); ++i)
    if (!has_signed(i, turn_)) return false;
  return true;
}

void Express::write(bool refusal) {
  sign(members_.index, turn_).word.store(turn_ << 1 | (refusal ? kRefusal : 0), std::memory_order_release);
  for (int rank : members_.ranks)
    if (rank != host_.rank()) host_.mark(rank);
}

void Express::begin(const Collective& call, uint64_t hash) {
  call_ = call, hash_ = hash, bytes_ = size_t(call.count) * size_of(call.dtype);
  ++turn_, seen_ = 0, awaited_ns_ = 0, state_ = State::waiting;
  Sign& own = sign(members_.index, turn_);
  own.hash = hash;
  if (bytes_ > Sign::kEagerBytes) {
    new (own.room) Places(shared_.places_of(call));
  } else {
    copy(bytes_ <= Sign::kRoom ? own.room : own.eager, call.input, bytes_);
  }
  write(false);
}

Express::State Express::finish(State state) {
  state_ = State::idle;
  work_.reset();
  return state;
}

Express::State Express::step(bool* moved) {
  if (state_ == State::waiting) {
    for (; seen_ < members_.size(); ++seen_) {
      if (seen_ == members_.index) continue;
      if (!has_signed(seen_, turn_)) return gone_[size_t(seen_)] ? finish(State::refused) : state_;
      if (refused(seen_)) return finish(State::refused);
    }
    if (bytes_ <= Sign::kEagerBytes) return add_up(), finish(State::done);
    std::vector<Places> places;
    for (int i = 0; i < members_.size(); ++i) places.push_back(*reinterpret_cast<Places*>(sign(i, turn_).room));
    work_ = shared_.start(call_, std::move(places));
    state_ = State::running;
  }
  if (state_ != State::running) return state_;
  const bool stepped = work_->step();
  if (moved) *moved = stepped;
  return work_->done() ? finish(State::done) : state_;
}

void Express::add_up() {  // in rank order, so that all ranks have the same bits
  for (int i = 0; i < members_.size(); ++i) {
    const Sign& theirs = sign(i, turn_);
    inputs_[size_t(i)] = i == members_.index ? call_.input : bytes_ <= Sign::kRoom ? theirs.room : theirs.eager;
  }
  void* out = call_.output;
  reduce({call_.dtype, call_.op, call_.pre, call_.post}, {&out, 1}, inputs_, size_t(call_.count));
}

bool Express::refuse_if_awaited(bool at_once) {
  bool awaited = false;
  for (int i = 0; i < members_.size() && !awaited; ++i) awaited = i != members_.index && has_signed(i, turn_ + 1);
  if (!awaited) return false;
  if (awaited_ns_ == 0) awaited_ns_ = now_ns();
  if (!at_once && now_ns() - awaited_ns_ < kWhileNs) return false;
  ++turn_, awaited_ns_ = 0;
  write(true);
  return true;
}

std::vector<int> Express::missing() const {
  std::vector<int> missing;
  for (int i = 0; i < members_.size(); ++i)
    if (i != members_.index && !has_signed(i, turn_)) missing.push_back(i);
  return missing;
}

}  // namespace lightcc
