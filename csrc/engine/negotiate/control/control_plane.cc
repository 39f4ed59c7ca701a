#include "engine/negotiate/control/control_plane.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/overloaded.h"
#include "engine/negotiate/control/call_slot.h"

namespace lightcc {
namespace {

// A parent on this host must not sleep on these; all others can wait until it comes itself to what they are about. What
// comes from another host wakes a sleeper.
bool is_urgent(const UpMessage& message) {
  return std::holds_alternative<Query>(message) || std::holds_alternative<MembersAbsent>(message) ||
         std::holds_alternative<BlockedReport>(message) || std::holds_alternative<DeadlockReply>(message) ||
         std::holds_alternative<LaunchRequest>(message) || std::holds_alternative<Contended>(message);
}

bool is_urgent(const UpFrame& frame) {
  const auto* message = std::get_if<UpMessage>(&frame);
  return message && is_urgent(*message);
}

// The one member that a message of the coordinator is for; -1: all.
int receiver(const DownMessage& message) {
  if (auto* missing = std::get_if<Missing>(&message)) return missing->to;
  if (auto* probe = std::get_if<DeadlockProbe>(&message)) return probe->rank;
  return -1;
}

}  // namespace

ControlPlane::ControlPlane(Peers& peers, const Group& group) : peers_(peers), group_(group), tree_(group) {
  auto stream = [&](int member) {
    return std::make_unique<MessageStream>(peers.control_link(group.id(), group.rank(member)));
  };
  if (!tree_.is_root()) parent_ = stream(tree_.parent());
  for (int child : tree_.children) children_.push_back(stream(child));
  children_await_ring_.resize(children_.size());
  if (parent_ && !children_.empty()) aggregator_ = std::make_unique<Aggregator>(tree_);
}

// ---- up

void ControlPlane::send_up(UpMessage message) {
  if (!parent_) return events_.push(MemberMessage{group_.index(), std::move(message)});
  ++sent_up_;
  if (aggregator_) {
    aggregator_->receive_up(Aggregator::kSelf, std::move(message), now_ns());
    forward_up();
    return;
  }
  parent_->send(encode(message));
  if (is_urgent(message)) ring_parent();
}

// What has found no room yet rings again when it finds some (step).
void ControlPlane::ring_parent() {
  ring(tree_.parent());
  parent_awaits_ring_ = parent_->waiting();
}

void ControlPlane::ring_child(size_t child) {
  ring(tree_.children[child]);
  children_await_ring_[child] = children_[child]->waiting();
}

bool ControlPlane::forward_up() {
  const std::vector<UpFrame> frames = aggregator_->take_frames();
  for (const UpFrame& frame : frames) parent_->send(encode(frame));
  if (std::ranges::any_of(frames, [](const UpFrame& frame) { return is_urgent(frame); })) ring_parent();
  return !frames.empty();
}

bool ControlPlane::receive_from_child(size_t child) {
  auto bytes = children_[child]->receive();
  if (!bytes) return false;
  const int sender = tree_.children[child];
  if (call_slot(*bytes)) return events_.push(ReceivedSlot{sender, std::move(*bytes)}), true;
  UpFrame frame = parse_up(*bytes, group_.rank(sender));
  std::visit(Overloaded{[&](UpMessage& message) { receive_up(child, std::move(message)); },
                        [&](AggregatedRequests& requests) { receive_up(child, std::move(requests)); },
                        [&](MemberLeft& left) { receive_left(left, sender); }},
             frame);
  return true;
}

void ControlPlane::receive_up(size_t child, UpMessage message) {
  if (aggregator_) return aggregator_->receive_up(int(child), std::move(message), now_ns());
  const int member = named_sender(message).value_or(tree_.children[child]);
  if (tree_.toward(member) != int(child))
    throw Error(Code::internal, "the coordinator was sent a message of a member that is not below its sender");
  events_.push(MemberMessage{member, std::move(message)});
}

void ControlPlane::receive_up(size_t child, AggregatedRequests requests) {
  if (aggregator_) return aggregator_->receive_up(int(child), std::move(requests), now_ns());
  for_each_request(requests, tree_.below[child], [&](int member, const Readiness& one) {
    std::visit([&](const auto& each) { events_.push(MemberMessage{member, each}); }, one);
  });
}

// ---- down

void ControlPlane::send_down(DownMessage message) {
  const int to = receiver(message);
  if (to == group_.index()) return events_.push(std::move(message));
  if (to >= 0 && tree_.toward(to) < 0)
    throw Error(Code::internal, "an answer is for a member that is not in its group");
  if (!children_.empty()) {
    const std::string bytes = encode(message);
    if (to >= 0) return children_[size_t(tree_.toward(to))]->send(bytes);
    send_to_children(message, bytes);
  }
  events_.push(std::move(message));
}

// A turn goes to those whom it is for, and to those on the way there. They may have nothing to do, and sleep.
void ControlPlane::send_to_children(const DownMessage& message, const std::string& bytes) {
  const auto* turn = std::get_if<LaunchTurn>(&message);
  std::vector<char> is_for(children_.size(), turn == nullptr);
  if (turn)
    for (const int32_t rank : turn->ranks)
      if (const int child = group_.has_member(rank) ? tree_.toward(rank) : -1; child >= 0) is_for[size_t(child)] = 1;
  for (size_t child = 0; child < children_.size(); ++child) {
    if (!is_for[child]) continue;
    children_[child]->send(bytes);
    if (turn) ring_child(child);
  }
}

bool ControlPlane::receive_from_parent() {
  auto bytes = parent_->receive();
  if (!bytes) return false;
  if (call_slot(*bytes)) return events_.push(ReceivedSlot{tree_.parent(), std::move(*bytes)}), true;
  DownFrame frame = parse_down(*bytes, group_.rank(tree_.parent()));
  std::visit(Overloaded{[&](DownMessage& message) { receive_down(std::move(message), *bytes); },
                        [&](MemberLeft& left) { receive_left(left, tree_.parent()); }},
             frame);
  return true;
}

void ControlPlane::receive_down(DownMessage message, const std::string& bytes) {
  const int to = receiver(message);
  if (to >= 0 && to != group_.index()) {
    if (tree_.toward(to) < 0) throw Error(Code::internal, "an answer came to a member that it is not for");
    return children_[size_t(tree_.toward(to))]->send(bytes);
  }
  if (aggregator_) {
    aggregator_->receive_down(message);
    forward_up();
    if (to < 0) send_to_children(message, bytes);
  }
  events_.push(std::move(message));
}

// ---- both

void ControlPlane::send_slot(std::string bytes) {
  if (children_.size() + (parent_ ? 1 : 0) != 1)
    throw Error(Code::internal, "a call's slot is for the only neighbour, and this member has several");
  (parent_ ? *parent_ : *children_[0]).send(std::move(bytes));
}

// After an error it begins anew at the first neighbour.
std::optional<ControlEvent> ControlPlane::step(bool* moved) {
  std::optional<ControlEvent> event = events_.pop();
  if (event) return event;
  for (size_t child = std::exchange(neighbour_, 0); child < children_.size(); ++child) {
    const bool pumped = children_[child]->pump();
    if (pumped && children_await_ring_[child]) ring_child(child);
    *moved |= pumped;
    for (; !event && receive_from_child(child); event = events_.pop()) *moved = true;
    if (!event) continue;
    neighbour_ = child;
    return event;
  }
  if (!parent_) return event;
  const bool pumped = parent_->pump();
  if (pumped && parent_awaits_ring_) ring_parent();
  *moved |= pumped;
  for (; !event && receive_from_parent(); event = events_.pop()) *moved = true;
  if (event) {
    neighbour_ = children_.size();
    return event;
  }
  if (!aggregator_) return event;
  if (std::exchange(expedite_, false)) aggregator_->pass_all();
  if (aggregator_->holds()) aggregator_->pass_expired(now_ns());
  *moved |= forward_up();
  return event;
}

std::optional<ControlEvent> ControlPlane::receive_from_below() {
  if (auto event = events_.pop()) return event;
  for (size_t child = 0; child < children_.size(); ++child)
    while (receive_from_child(child))
      if (auto event = events_.pop()) return event;
  return std::nullopt;
}

bool ControlPlane::flush() {
  bool waiting = false;
  auto pump = [&](MessageStream& stream) { stream.pump(), waiting |= stream.waiting(); };
  if (parent_) pump(*parent_);
  for (auto& child : children_) pump(*child);
  return waiting;
}

// The coordinator may sleep for as long as it has announced nothing itself, since nothing can run without it. An
// aggregator must pass on what it has received.
void ControlPlane::remind() {
  if (!parent_ || tree_.parent() == 0 || reminded_ == sent_up_) return;
  reminded_ = sent_up_;
  ring(tree_.parent());
}

int ControlPlane::silent_since(uint64_t asked_ns) const {
  const int parent = tree_.parent();
  if (parent <= 0 || !peers_.is_local(group_.rank(parent))) return 0;
  return peers_.header(group_.rank(parent)).awake_ns.load(std::memory_order_relaxed) < asked_ns ? parent : 0;
}

// ---- members that leave

void ControlPlane::receive_left(const MemberLeft& left, int from) {
  if (!group_.has_member(left.member) || left.member == group_.index())
    throw Error(Code::internal, "a member that cannot have left was said to have left");
  events_.push(Departure{left.member, left.why, from});
}

void ControlPlane::member_left(int member, const std::string& why, int from) {
  cut_off_ = cut_off_ || std::find(tree_.ancestors.begin(), tree_.ancestors.end(), member) != tree_.ancestors.end();
  if (aggregator_) {
    aggregator_->member_left();
    forward_up();
  }
  spread(member, why, from);
  // Idle, it must still answer what this member has announced.
  if (parent_ && tree_.parent() != member) ring(tree_.parent());
}

void ControlPlane::leave(const std::string& why) {
  if (aggregator_) {
    aggregator_->member_left();
    forward_up();
  }
  spread(group_.index(), why, kSeen);
}

void ControlPlane::spread(int leaver, const std::string& why, int except) {
  const auto sees = [&](int member) { return group_.share_host(member, leaver); };
  const MemberLeft left{leaver, why};
  if (parent_ && tree_.parent() != except && !sees(tree_.parent())) parent_->send(encode(UpFrame(left)));
  for (size_t i = 0; i < children_.size(); ++i)
    if (tree_.children[i] != except && !sees(tree_.children[i])) children_[i]->send(encode(DownFrame(left)));
}

}  // namespace lightcc
