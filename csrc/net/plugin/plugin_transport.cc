#include "net/plugin/plugin_transport.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

struct Frames {
  size_t bytes, count;
};
// A control link has many frames, so that messages find room while the peer is idle and does not look. NCCL has at most
// 32 requests under way.
constexpr Frames kDataFrames{128 << 10, 8}, kControlFrames{4 << 10, 32};
constexpr uint64_t kBelowNs = 100'000;  // how often the transport below makes a step while no link connects
constexpr uint64_t kRetiringNs = 5'000'000'000;
constexpr uint64_t kLeastSleepNs = 20'000, kMostSleepNs = 200'000, kMostIdleSleepNs = 10'000'000;

struct Introduction {  // as it travels: both ends are of one build
  PluginHandle handle;
  char plugin[48];
};
struct Notice {
  enum What : uint64_t { finished, received } kind;
  uint64_t frames;  // that were sent in all; or that have come, in answer to that
};

template <class Said> bool say(Link& link, const Said& said) {
  std::byte* to = link.reserve(sizeof said);
  if (!to) return false;
  std::memcpy(to, &said, sizeof said);
  link.commit(sizeof said);
  return true;
}
template <class Said> std::optional<Said> heard(Link& link) {
  const std::byte* from = link.peek(sizeof(Said));
  if (!from) return {};
  Said said;
  std::memcpy(&said, from, sizeof said);
  link.consume(sizeof said);
  return said;
}

}  // namespace

struct PluginTransport::OpenLink {
  PluginStream stream;
  std::unique_ptr<Link> below;
  const bool connects;                 // this rank begins; the other answers, or begins when it sends first
  bool opened = false;                 // this end's handle is on its way
  std::optional<PluginHandle> of_peer{};
  uint64_t connecting_ns = 0;          // when that has come
  std::optional<uint64_t> peer_frames{};  // that it has sent in all
  bool said_finished = false, said_received = false, peer_received = false;
  bool retired = false;
  uint64_t failed_ns = 0;
  bool is_dirty = false;               // has records that were not flushed
};

class PluginTransport::PluginLink : public Link {
 public:
  PluginLink(PluginTransport& transport, OpenLink& state) : transport_(transport), state_(state) {}
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
  OpenLink& state_;
};

PluginTransport::PluginTransport(std::unique_ptr<PluginDevice> device, int rank, std::vector<std::string> names,
                                 std::unique_ptr<Transport> below, PluginTimeouts timeouts)
    : device_(std::move(device)),
      names_(std::move(names)),
      below_(std::move(below)),
      timeouts_(timeouts),
      links_(rank) {}

PluginTransport::~PluginTransport() = default;

// ---- links

PluginTransport::OpenLink& PluginTransport::link_state(const LinkKey& key) {
  return links_.get(key, [&] {
    const Frames& frames = key.lane == kControl ? kControlFrames : kDataFrames;
    return std::unique_ptr<OpenLink>(
        new OpenLink{.stream = {*device_, names_[size_t(key.peer)], frames.bytes, frames.count},
                     .below = below_->link(key.group, key.lane, key.peer),
                     .connects = links_.connects(key.peer)});
  });
}

std::unique_ptr<Link> PluginTransport::link(int group, int lane, int peer) {
  return std::make_unique<PluginLink>(*this, link_state({group, lane, peer}));
}

void PluginTransport::open(OpenLink& state) {
  if (state.opened || links_.ended()) return;
  Introduction own{state.stream.listen(), {}};
  device_->name().copy(own.plugin, sizeof own.plugin - 1);
  if (!say(*state.below, own)) throw Error(Code::internal, "a link has no room for its first record");
  state.opened = true;
  under_way_ = 1;
}

// What the peer has said on the link below. To ask there connects; whoever begins asks when it has begun.
void PluginTransport::hear(const LinkKey& key, OpenLink& state) {
  if (state.connects && !state.opened) return;
  if (!state.of_peer) {
    auto theirs = heard<Introduction>(*state.below);
    if (!theirs) return;
    theirs->plugin[sizeof theirs->plugin - 1] = 0;
    if (theirs->plugin != device_->name().substr(0, sizeof theirs->plugin - 1))
      throw Error(Code::invalid_argument, names_[size_t(key.peer)] + " has NCCL's network plugin '" + theirs->plugin +
                                              "', this rank '" + device_->name() +
                                              "': LIGHTCC_NET_PLUGIN has to mean the same on all hosts");
    state.of_peer = theirs->handle;
    state.connecting_ns = now_ns_;
    open(state);
  }
  while (const auto notice = heard<Notice>(*state.below)) {
    if (notice->kind == Notice::finished) state.peer_frames = notice->frames;
    state.peer_received |= notice->kind == Notice::received;
  }
  if (!state.said_received && has_all(state))
    state.said_received = say(*state.below, Notice{Notice::received, *state.peer_frames});
}

bool PluginTransport::step(const LinkKey& key, OpenLink& state, bool hears) {
  if (hears) hear(key, state);
  if (!state.opened) return false;
  // A peer that leaves waits until all has come, so one connects to it as well.
  const bool connects = state.of_peer && !state.stream.connected() && !state.stream.failed() && !has_all(state);
  const bool connected = connects && !links_.ended() && state.stream.connect(*state.of_peer);
  const bool moved = state.stream.step();
  judge(key, state);
  return connected || moved;
}

bool PluginTransport::has_all(const OpenLink& state) {
  return state.peer_frames && state.stream.has_received(*state.peer_frames);
}

// Nothing of this link is missed any more.
bool PluginTransport::in_peace(const LinkKey& key, const OpenLink& state) const {
  return has_all(state) || state.retired || links_.has_left(key.peer) || links_.ended();
}

// A connection that fails, or does not come about, is a loss, unless its end was in peace.
void PluginTransport::judge(const LinkKey& key, OpenLink& state) const {
  const PluginStream& stream = state.stream;
  const bool connects = state.of_peer && !stream.connected() && !stream.failed();
  if ((!connects && !stream.failed()) || in_peace(key, state)) return;
  const std::string& name = names_[size_t(key.peer)];
  if (connects && now_ns_ - state.connecting_ns > timeouts_.connect_ns)
    throw Error(Code::peer_lost, name + " cannot be reached: NCCL's network plugin " + device_->name() +
                                     " has not connected in " +
                                     std::to_string(timeouts_.connect_ns / 1'000'000'000) + " s");
  if (!stream.failed()) return;
  if (state.failed_ns == 0) state.failed_ns = now_ns_;
  if (now_ns_ - state.failed_ns > timeouts_.verdict_ns)
    throw Error(Code::peer_lost, name + " cannot be reached any more: " + stream.failure());
}

bool PluginTransport::step() {
  now_ns_ = now_ns();
  PluginDevice::forget_warnings();
  const bool hears = under_way_ > 0 || now_ns_ - below_ns_ > kBelowNs;
  bool moved = false;
  if (hears) {
    below_ns_ = now_ns_;
    moved = below_->step();
  }
  int under_way = 0;
  for (auto& [key, state] : links_) {
    moved |= step(key, *state, hears);
    const PluginStream& stream = state->stream;
    const bool connects = state->of_peer && !stream.connected(), sends = state->opened && !stream.delivered();
    const bool is_over = stream.failed() || links_.has_left(key.peer) || (!stream.connected() && has_all(*state));
    under_way += (connects || sends) && !is_over;
  }
  under_way_ = under_way;
  if (!retiring_.empty()) forget_retired();
  if (moved) moved_ns_ = now_ns_;
  return moved;
}

// The longer nothing has come, the longer it may take: after a pause a thousandth of it at most, where that is more.
uint64_t PluginTransport::arm() {
  const uint64_t quiet_ns = now_ns() - moved_ns_;
  const uint64_t most_ns = std::clamp<uint64_t>(quiet_ns / 1000, kMostSleepNs, kMostIdleSleepNs);
  return std::min(below_->arm(), std::clamp(quiet_ns / 8, kLeastSleepNs, most_ns));
}

void PluginTransport::flush() {
  std::erase_if(dirty_, [](OpenLink* state) {
    state->is_dirty = !state->stream.flush();
    return !state->is_dirty;
  });
  below_->flush();
}

void PluginTransport::mark_left(int peer) {
  links_.mark_left(peer);
  below_->mark_left(peer);
}

// ---- ends

// True once the peer has received all that was committed, or had finished itself and is gone. Of what has failed it is
// not told.
bool PluginTransport::finish(OpenLink& state) {
  if (!state.opened || !state.stream.send_failure().empty()) return true;
  if (!state.stream.delivered()) return false;
  if (!state.said_finished) state.said_finished = say(*state.below, Notice{Notice::finished, state.stream.sent()});
  const bool is_gone = state.said_received && state.stream.failed();
  return state.said_finished && (state.peer_received || is_gone || state.stream.sent() == 0);
}

bool PluginTransport::finish() {
  now_ns_ = now_ns();
  flush();
  bool delivered = true;
  for (auto& [key, state] : links_) {
    step(key, *state, true);
    delivered &= finish(*state) || links_.has_left(key.peer);
  }
  below_->flush();
  return delivered && below_->finish();
}

void PluginTransport::retire(int group) {
  flush();
  for (auto& [key, state] : links_.of_group(group)) state->retired = true;
  retiring_[group] = now_ns_ = now_ns();
  forget_retired();
}

// Both ends have told the other that all has come; a peer that has used no link, or has left, does not tell.
void PluginTransport::forget_retired() {
  for (auto group = retiring_.begin(); group != retiring_.end();) {
    const auto links = links_.of_group(group->first);
    bool all_over = true;
    for (auto& [key, state] : links) {
      const bool is_over = finish(*state) && (state->said_received || !state->of_peer);
      all_over &= is_over || links_.has_left(key.peer);
    }
    if (!all_over && now_ns_ - group->second < kRetiringNs) {
      ++group;
      continue;
    }
    for (const auto& [key, state] : links) std::erase(dirty_, state.get());
    links_.erase(links);
    below_->retire(group->first);
    group = retiring_.erase(group);
  }
}

void PluginTransport::end(const Error& cause) {
  links_.end_epoch(cause);
  below_->end(cause);
}

void PluginTransport::close() {
  links_.end_epoch(Error(Code::shut_down, "this rank has shut down"));
  under_way_ = 0;
  dirty_.clear();
  links_.clear();
  below_->close();
}

void PluginTransport::close_in_child() {
  for (auto& [key, state] : links_) state->stream.abandon();
  device_->abandon();
  below_->close_in_child();
}

}  // namespace lightcc
