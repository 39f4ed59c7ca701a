#include "net/plugin/plugin_transport.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

struct Frames {
  size_t bytes, count;
};
// Of control many, so that messages find room while the peer has nothing to do and does not look. 32 is as many as NCCL
// has requests under way at most.
constexpr Frames kDataFrames{128 << 10, 8}, kControlFrames{4 << 10, 32};
constexpr uint64_t kBelowNs = 100'000;  // how often the transport below makes a step while no link connects
constexpr uint64_t kLeastSleepNs = 20'000, kMostSleepNs = 200'000;
constexpr std::byte kFinished{1};

struct Introduction {  // as it travels: both ends are of one build
  PluginHandle handle;
  char plugin[48];
};

}  // namespace

struct PluginTransport::LinkState {
  PluginStream stream;
  std::unique_ptr<Link> below;
  const bool connects;                 // this rank begins; the other answers, or begins when it sends first
  bool opened = false;                 // this end's handle is on its way
  PluginHandle of_peer{};
  uint64_t connecting_ns = 0;          // since the peer's handle has come; 0: it has not
  bool has_introduction = false, peer_finished = false, said_finished = false;
  uint64_t failed_ns = 0;
  bool is_dirty = false;               // has records that were not flushed
};

class PluginTransport::PluginLink : public Link {
 public:
  PluginLink(PluginTransport& transport, LinkState& state) : transport_(transport), state_(state) {}
  std::byte* reserve(size_t n) override {
    transport_.open(state_);
    return state_.stream.reserve(n);
  }
  void commit(size_t n) override {
    state_.stream.commit(n);
    if (!std::exchange(state_.is_dirty, true)) transport_.dirty_.push_back(&state_);
    transport_.sent_bytes_.fetch_add(n, std::memory_order_relaxed);
  }
  const std::byte* peek(size_t n) override {
    if (state_.connects) transport_.open(state_);  // only the rank that begins must act before the peer does
    return state_.stream.peek(n);
  }
  void consume(size_t n) override { state_.stream.consume(n); }
  size_t record_bytes() const override { return state_.stream.record_bytes(); }

 private:
  PluginTransport& transport_;
  LinkState& state_;
};

PluginTransport::PluginTransport(std::unique_ptr<PluginDevice> device, int rank, std::vector<std::string> names,
                                 std::unique_ptr<Transport> below, PluginTimeouts timeouts)
    : device_(std::move(device)),
      rank_(rank),
      names_(std::move(names)),
      below_(std::move(below)),
      timeouts_(timeouts),
      left_(names_.size()) {}

PluginTransport::~PluginTransport() = default;

// ---- links

PluginTransport::LinkState& PluginTransport::link_state(const Key& key) {
  auto& state = link_states_[key];
  if (!state) {
    const Frames& frames = key.lane == kControl ? kControlFrames : kDataFrames;
    state.reset(new LinkState{.stream = {*device_, names_[size_t(key.peer)], frames.bytes, frames.count},
                              .below = below_->link(key.group, key.lane, key.peer),
                              .connects = rank_ > key.peer});
  }
  return *state;
}

std::unique_ptr<Link> PluginTransport::link(int group, int lane, int peer) {
  return std::make_unique<PluginLink>(*this, link_state({group, lane, peer}));
}

void PluginTransport::open(LinkState& state) {
  if (state.opened || ended_) return;
  std::byte* to = state.below->reserve(sizeof(Introduction));
  if (!to) return;
  Introduction own{state.stream.listen(), {}};
  device_->name().copy(own.plugin, sizeof own.plugin - 1);
  std::memcpy(to, &own, sizeof own);
  state.below->commit(sizeof own);
  state.opened = true;
  under_way_ = 1;
}

// What the peer has said on the link below.
void PluginTransport::hear(const Key& key, LinkState& state) {
  if (!state.has_introduction) {
    Introduction theirs;
    const std::byte* from = state.below->peek(sizeof theirs);
    if (!from) return;
    std::memcpy(&theirs, from, sizeof theirs);
    state.below->consume(sizeof theirs);
    theirs.plugin[sizeof theirs.plugin - 1] = 0;
    if (theirs.plugin != device_->name().substr(0, sizeof theirs.plugin - 1))
      throw Error(Code::invalid_argument, names_[size_t(key.peer)] + " has NCCL's network plugin '" + theirs.plugin +
                                              "', this rank '" + device_->name() +
                                              "': LIGHTCC_NET_PLUGIN has to mean the same on all hosts");
    state.of_peer = theirs.handle;
    state.has_introduction = true;
    state.connecting_ns = now_ns_;
    open(state);
  }
  if (!state.peer_finished && state.below->peek(1)) {
    state.below->consume(1);
    state.peer_finished = true;
  }
}

bool PluginTransport::step(const Key& key, LinkState& state) {
  hear(key, state);
  bool moved = false;
  if (state.opened && state.has_introduction && !state.stream.connected() && state.stream.failure().empty())
    moved = state.stream.connect(state.of_peer);
  moved |= state.stream.step();
  judge(key, state);
  return moved;
}

// A connection that fails, or does not come about, is a loss, unless its end was in peace.
void PluginTransport::judge(const Key& key, LinkState& state) {
  const std::string& name = names_[size_t(key.peer)];
  if (state.stream.failure().empty()) {
    const bool connects = state.connecting_ns && !state.stream.connected();
    if (connects && now_ns_ - state.connecting_ns > timeouts_.connect_ns && !left_[size_t(key.peer)])
      throw Error(Code::peer_lost, name + " cannot be reached: NCCL's network plugin " + device_->name() +
                                       " has not connected in " +
                                       std::to_string(timeouts_.connect_ns / 1'000'000'000) + " s");
    return;
  }
  if (state.failed_ns == 0) state.failed_ns = now_ns_;
  const bool in_peace = state.peer_finished || left_[size_t(key.peer)] || ended_;
  if (!in_peace && now_ns_ - state.failed_ns > timeouts_.verdict_ns)
    throw Error(Code::peer_lost, name + " cannot be reached any more: " + state.stream.failure());
}

bool PluginTransport::step() {
  now_ns_ = now_ns();
  bool moved = false;
  if (under_way_ > 0 || now_ns_ - below_ns_ > kBelowNs) {
    below_ns_ = now_ns_;
    moved = below_->step();
  }
  int under_way = 0;
  for (auto& [key, state] : link_states_) {
    moved |= step(key, *state);
    const bool connects = state->has_introduction && !state->stream.connected() && state->stream.failure().empty();
    under_way += !left_[size_t(key.peer)] && (connects || (state->opened && !state->stream.delivered()));
  }
  under_way_ = under_way;
  if (!retiring_.empty()) forget_retired();
  if (moved) moved_ns_ = now_ns_;
  return moved;
}

// The longer nothing has come, the longer it may take.
uint64_t PluginTransport::arm() {
  const uint64_t quiet_ns = now_ns() - moved_ns_;
  return std::min(below_->arm(), std::clamp(quiet_ns / 8, kLeastSleepNs, kMostSleepNs));
}

void PluginTransport::flush() {
  for (LinkState* state : std::exchange(dirty_, {})) {
    state->is_dirty = false;
    state->stream.flush();
  }
  below_->flush();
}

void PluginTransport::mark_left(int peer) {
  left_[size_t(peer)] = 1;
  below_->mark_left(peer);
}

// ---- ends

// True once all that was committed has been sent, and the peer is told so.
bool PluginTransport::finish(LinkState& state) {
  if (state.said_finished || !state.opened) return true;
  if (!state.stream.delivered()) return false;
  std::byte* to = state.below->reserve(1);
  if (!to) return false;
  *to = kFinished;
  state.below->commit(1);
  return state.said_finished = true;
}

bool PluginTransport::finish() {
  now_ns_ = now_ns();
  flush();
  bool delivered = true;
  for (auto& [key, state] : link_states_) {
    step(key, *state);
    delivered &= finish(*state) || left_[size_t(key.peer)];
  }
  if (delivered) below_->finish();  // the peer need not have read that it is
  below_->flush();
  return delivered;
}

void PluginTransport::retire(int group) {
  flush();
  retiring_.insert(group);
  forget_retired();
}

void PluginTransport::forget_retired() {
  for (auto group = retiring_.begin(); group != retiring_.end();) {
    const auto first = link_states_.lower_bound({*group, kControl, 0});
    auto last = first;
    bool all_finished = true;
    for (; last != link_states_.end() && last->first.group == *group; ++last)
      all_finished &= finish(*last->second) || left_[size_t(last->first.peer)];
    if (!all_finished) {
      ++group;
      continue;
    }
    link_states_.erase(first, last);
    below_->retire(*group);
    group = retiring_.erase(group);
  }
}

void PluginTransport::end(const Error& cause) {
  ended_ = true;
  below_->end(cause);
}

void PluginTransport::close() {
  ended_ = true;
  under_way_ = 0;
  dirty_.clear();
  link_states_.clear();
  below_->close();
}

void PluginTransport::close_in_child() {
  for (auto& [key, state] : link_states_) state->stream.abandon();
  device_->abandon();
  below_->close_in_child();
}

}  // namespace lightcc
