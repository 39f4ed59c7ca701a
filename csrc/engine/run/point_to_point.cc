#include "engine/run/point_to_point.h"

#include <utility>

#include "base/clock.h"

namespace lightcc {
namespace {

// A rank that leaves waits so long at most for what it has sent to arrive on other hosts (lifecycle.cc), to which its
// leaving may be known before. On its own host all is there.
constexpr uint64_t kArrivesNs = 2'000'000'000;

}  // namespace

PointToPoint::PointToPoint(Peers& peers, const Group& group, Effects& effects, Tracing& tracing)
    : peers_(peers), group_(group), effects_(effects), tracing_(tracing), channels_(size_t(group.size())) {}

PeerChannel& PointToPoint::channel(int member) {
  std::unique_ptr<PeerChannel>& channel = channels_[size_t(member)].channel;
  if (!channel) {
    const int rank = group_.rank(member);
    channel = std::make_unique<PeerChannel>(peers_.point_to_point_link(group_.id(), rank), peers_.name(peers_.rank()),
                                            peers_.name(rank), effects_, tracing_);
  }
  return *channel;
}

void PointToPoint::submit(const RequestPtr& request) {
  const int member = request->what.root;
  if (const std::string& left = channels_[size_t(member)].left; !left.empty())
    return effects_.push(effect::Finish{request, Code::shut_down, request->title() + ": " + left});
  try {
    channel(member);
  } catch (const std::exception& error) {  // no link comes about: that ends the epoch, which does not know of it yet
    effects_.push(effect::Finish{request, Code::internal, request->title() + ": " + error.what()});
    throw;
  }
  channel(member).submit(request);
  if (!std::exchange(channels_[size_t(member)].active, true)) active_.push_back(member);
}

bool PointToPoint::step() {
  bool moved = false;
  std::erase_if(active_, [&](int member) {
    Channel& one = channels_[size_t(member)];
    moved |= step(one, member);
    one.active = one.channel->active();
    return !one.active;
  });
  return moved;
}

bool PointToPoint::step(Channel& one, int member) {
  const bool moved = one.channel->step();
  const bool has_left = one.channel->has_peer_left();
  if (one.left.empty() && !has_left) return moved;
  const uint64_t now = now_ns();
  if (one.left.empty()) {  // others tell why, unless they have left, too
    if (one.moved_ns == 0) one.moved_ns = now;
    if (now - one.moved_ns <= kArrivesNs) return moved;
    one.left = peers_.name(group_.rank(member)) + " has left";
  }
  if (has_left) one.channel->fail_all(Code::shut_down, one.left);
  else if (moved) one.moved_ns = now;
  else if (peers_.is_local(group_.rank(member)) || now - one.moved_ns > kArrivesNs)
    one.channel->fail_all(Code::shut_down, one.left);
  return moved;
}

void PointToPoint::member_left(int member, const std::string& why, uint64_t now_ns) {
  Channel& one = channels_[size_t(member)];
  if (!one.left.empty()) return;
  one.left = why;
  one.moved_ns = now_ns;
}

// The ranks of its host see it.
void PointToPoint::leave() {
  for (size_t member = 0; member < channels_.size(); ++member)
    if (channels_[member].channel && !peers_.is_local(group_.rank(int(member)))) channels_[member].channel->leave();
}

void PointToPoint::fail_all(Code code, const std::string& text) {
  for (const int member : std::exchange(active_, {})) {
    channels_[size_t(member)].active = false;
    channels_[size_t(member)].channel->fail_all(code, text);
  }
}

}  // namespace lightcc
