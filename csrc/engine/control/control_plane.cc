#include "engine/control/control_plane.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace lightcc {
namespace {

template <class... Kinds>
bool is_one_of(const Message& message) {
  return (std::holds_alternative<Kinds>(message) || ...);
}

// A parent on this host must not sleep on these; all others can wait until it comes itself to what they are about. What
// comes from another host wakes who sleeps.
bool is_urgent(const Message& message) {
  return is_one_of<Query, MembersAbsent, BlockedReport, DeadlockReply>(message);
}

// The one member that a message of the coordinator is for; -1: all.
int receiver(const Message& message) {
  if (auto* missing = std::get_if<Missing>(&message)) return missing->to;
  if (auto* probe = std::get_if<DeadlockProbe>(&message)) return probe->rank;
  return -1;
}

}  // namespace

ControlPlane::ControlPlane(Peers& peers, const Group& group, ControlPlaneOwner& owner)
    : peers_(peers), group_(group), owner_(owner), tree_(group) {
  auto stream = [&](int member) {
    return std::make_unique<MessageStream>(peers.control_link(group.id(), group.rank(member)));
  };
  if (!tree_.is_root()) parent_ = stream(tree_.parent());
  for (int child : tree_.children) children_.push_back(stream(child));
  if (parent_ && !children_.empty()) aggregator_ = std::make_unique<Aggregator>(tree_);
}

// ---- up

void ControlPlane::send_up(Message message) {
  if (!parent_) return owner_.receive_up(group_.index(), std::move(message));
  ++sent_up_;
  if (aggregator_) {
    aggregator_->receive_up(Aggregator::kSelf, std::move(message), now_ns());
    forward_up();
    return;
  }
  parent_->send(encode(message));
  if (is_urgent(message)) ring(tree_.parent());
}

bool ControlPlane::forward_up() {
  bool sent = false;
  for (const Message& message : aggregator_->take_messages()) parent_->send(encode(message)), sent = true;
  return sent;
}

void ControlPlane::receive_from_child(size_t child, Message message) {
  if (auto* left = std::get_if<MemberLeft>(&message)) {
    check_left(*left);
    return owner_.remote_member_left(left->member, left->why, tree_.children[child]);
  }
  if (aggregator_) return aggregator_->receive_up(int(child), std::move(message), now_ns());
  if (auto* aggregated = std::get_if<AggregatedRequests>(&message))
    return for_each_request(*aggregated, tree_.below[child],
                            [&](int member, const std::variant<Announce, CachedRequest>& one) {
                              std::visit([&](auto& each) { owner_.receive_up(member, each); }, one);
                            });
  int member = tree_.children[child];
  if (auto* query = std::get_if<Query>(&message)) member = query->member;
  if (auto* refused = std::get_if<Refused>(&message)) member = refused->member;
  if (auto* report = std::get_if<BlockedReport>(&message)) member = report->rank;
  if (auto* reply = std::get_if<DeadlockReply>(&message)) member = reply->rank;
  if (tree_.toward(member) != int(child))
    throw Error(Code::internal, "the coordinator was sent a message of a member that is not below its sender");
  owner_.receive_up(member, std::move(message));
}

void ControlPlane::take_in() {
  for (size_t child = 0; child < children_.size(); ++child)
    while (auto bytes = children_[child]->receive()) receive_from_child(child, parse(*bytes));
}

// ---- down

void ControlPlane::send_down(const Message& message) {
  const int to = receiver(message);
  if (to == group_.index()) return owner_.receive_down(message);
  if (to >= 0 && tree_.toward(to) < 0)
    throw Error(Code::internal, "an answer is for a member that is not in its group");
  if (!children_.empty()) {
    const std::string bytes = encode(message);
    if (to >= 0) return children_[size_t(tree_.toward(to))]->send(bytes);
    for (auto& child : children_) child->send(bytes);
  }
  owner_.receive_down(message);
}

void ControlPlane::forward_down(const std::string& bytes) {
  Message message = parse(bytes);
  if (auto* left = std::get_if<MemberLeft>(&message)) {
    check_left(*left);
    return owner_.remote_member_left(left->member, left->why, tree_.parent());
  }
  const int to = receiver(message);
  if (to >= 0 && to != group_.index()) {
    if (tree_.toward(to) < 0) throw Error(Code::internal, "an answer came to a member that it is not for");
    return children_[size_t(tree_.toward(to))]->send(bytes);
  }
  if (aggregator_) {
    aggregator_->receive_down(message);
    forward_up();
    if (to < 0)
      for (auto& child : children_) child->send(bytes);
  }
  owner_.receive_down(std::move(message));
}

// ---- both

bool ControlPlane::step() {
  bool moved = false;
  for (size_t child = 0; child < children_.size(); ++child) {
    moved |= children_[child]->pump();
    while (auto bytes = children_[child]->receive()) receive_from_child(child, parse(*bytes)), moved = true;
  }
  if (!parent_) return moved;
  moved |= parent_->pump();
  while (auto bytes = parent_->receive()) forward_down(*bytes), moved = true;
  if (!aggregator_) return moved;
  if (std::exchange(expedite_, false)) aggregator_->pass_all();
  if (aggregator_->holds()) aggregator_->pass_expired(now_ns());
  return forward_up() || moved;
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

void ControlPlane::check_left(const MemberLeft& left) const {
  if (!group_.has_member(left.member) || left.member == group_.index())
    throw Error(Code::internal, "a member that cannot have left was said to have left");
}

void ControlPlane::member_left(int member, const std::string& why, int from) {
  take_in();  // what it announced before it left
  cut_off_ = cut_off_ || std::find(tree_.ancestors.begin(), tree_.ancestors.end(), member) != tree_.ancestors.end();
  if (aggregator_) aggregator_->member_left(), forward_up();
  spread(member, why, from);
  // Idle, it must still answer what this member has announced.
  if (parent_ && tree_.parent() != member) ring(tree_.parent());
}

void ControlPlane::leave(const std::string& why) {
  if (aggregator_) aggregator_->member_left(), forward_up();
  spread(group_.index(), why, kSeen);
}

void ControlPlane::spread(int leaver, const std::string& why, int except) {
  const auto sees = [&](int member) { return group_.share_host(member, leaver); };
  const Message message = MemberLeft{leaver, why};
  if (parent_ && tree_.parent() != except && !sees(tree_.parent())) parent_->send(encode(message));
  for (size_t i = 0; i < children_.size(); ++i)
    if (tree_.children[i] != except && !sees(tree_.children[i])) children_[i]->send(encode(message));
}

}  // namespace lightcc
