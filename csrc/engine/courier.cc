#include "engine/courier.h"

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
bool is_urgent(const Message& message) { return is_one_of<Query, Contest, Stuck, Plea>(message); }

// The one member that a message of the coordinator is for; -1: all.
int receiver(const Message& message) {
  if (auto* missing = std::get_if<Missing>(&message)) return missing->to;
  if (auto* accuse = std::get_if<Accuse>(&message)) return accuse->rank;
  return -1;
}

}  // namespace

Courier::Courier(Peers& peers, const Topology& topology, int group, const Members& members, CourierOwner& owner)
    : peers_(peers),
      topology_(topology),
      members_(members),
      owner_(owner),
      tree_(members.ranks, topology, members.index) {
  auto mailbox = [&](int member) {
    return std::make_unique<Mailbox>(peers.control_link(group, members.ranks[size_t(member)]));
  };
  if (!tree_.is_root()) parent_ = mailbox(tree_.parent());
  for (int child : tree_.children) children_.push_back(mailbox(child));
  if (parent_ && !children_.empty()) relay_ = std::make_unique<Relay>(tree_);
}

// ---- up

void Courier::say(Message message) {
  if (!parent_) return owner_.receive(members_.index, std::move(message));
  ++said_;
  if (relay_) {
    relay_->hear(Relay::kSelf, std::move(message), now_ns());
    send_up();
    return;
  }
  parent_->send(encode(message));
  if (is_urgent(message)) ring(tree_.parent());
}

bool Courier::send_up() {
  bool sent = false;
  for (const Message& message : relay_->take()) parent_->send(encode(message)), sent = true;
  return sent;
}

void Courier::hear(size_t child, Message message) {
  if (auto* gone = std::get_if<Gone>(&message)) {
    check_gone(*gone);
    return owner_.farewell(gone->member, gone->why, tree_.children[child]);
  }
  if (relay_) return relay_->hear(int(child), std::move(message), now_ns());
  if (auto* said = std::get_if<Said>(&message))
    return each_said(*said, tree_.below[child], [&](int member, const std::variant<Announce, Recall>& one) {
      std::visit([&](auto& each) { owner_.receive(member, each); }, one);
    });
  int member = tree_.children[child];
  if (auto* query = std::get_if<Query>(&message)) member = query->member;
  if (auto* stuck = std::get_if<Stuck>(&message)) member = stuck->rank;
  if (auto* plea = std::get_if<Plea>(&message)) member = plea->rank;
  if (tree_.toward(member) != int(child))
    throw Error(Code::internal, "the coordinator was sent a message of a member that is not below its sender");
  owner_.receive(member, std::move(message));
}

void Courier::take_in() {
  for (size_t child = 0; child < children_.size(); ++child)
    while (auto bytes = children_[child]->receive()) hear(child, parse(*bytes));
}

// ---- down

void Courier::tell(const Message& message) {
  const int to = receiver(message);
  if (to == members_.index) return owner_.handle(message);
  if (to >= 0 && tree_.toward(to) < 0)
    throw Error(Code::internal, "an answer is for a member that is not in its group");
  if (!children_.empty()) {
    const std::string bytes = encode(message);
    if (to >= 0) return children_[size_t(tree_.toward(to))]->send(bytes);
    for (auto& child : children_) child->send(bytes);
  }
  owner_.handle(message);
}

void Courier::pass_down(const std::string& bytes) {
  Message message = parse(bytes);
  if (auto* gone = std::get_if<Gone>(&message)) {
    check_gone(*gone);
    return owner_.farewell(gone->member, gone->why, tree_.parent());
  }
  const int to = receiver(message);
  if (to >= 0 && to != members_.index) {
    if (tree_.toward(to) < 0) throw Error(Code::internal, "an answer went astray");
    return children_[size_t(tree_.toward(to))]->send(bytes);
  }
  if (relay_) {
    relay_->tell(message);
    send_up();
    if (to < 0)
      for (auto& child : children_) child->send(bytes);
  }
  owner_.handle(std::move(message));
}

// ---- both

bool Courier::step() {
  bool moved = false;
  for (size_t child = 0; child < children_.size(); ++child) {
    moved |= children_[child]->pump();
    while (auto bytes = children_[child]->receive()) hear(child, parse(*bytes)), moved = true;
  }
  if (!parent_) return moved;
  moved |= parent_->pump();
  while (auto bytes = parent_->receive()) pass_down(*bytes), moved = true;
  if (!relay_) return moved;
  if (std::exchange(hurry_, false)) relay_->hurry();
  if (relay_->holds()) relay_->look(now_ns());
  return send_up() || moved;
}

bool Courier::flush() {
  bool waiting = false;
  auto pump = [&](Mailbox& mailbox) { mailbox.pump(), waiting |= mailbox.waiting(); };
  if (parent_) pump(*parent_);
  for (auto& child : children_) pump(*child);
  return waiting;
}

// The coordinator may sleep for as long as it has said nothing itself, since nothing can run without it. A relay must
// pass on what it has heard.
void Courier::remind() {
  if (!parent_ || tree_.parent() == 0 || reminded_ == said_) return;
  reminded_ = said_;
  ring(tree_.parent());
}

int Courier::silent_since(uint64_t asked_ns) const {
  const int parent = tree_.parent();
  if (parent <= 0 || !peers_.here(members_.ranks[size_t(parent)])) return 0;
  return peers_.header(members_.ranks[size_t(parent)]).awake_ns.load(std::memory_order_relaxed) < asked_ns ? parent : 0;
}

// ---- goodbyes

void Courier::check_gone(const Gone& gone) const {
  if (gone.member < 0 || gone.member >= members_.size() || gone.member == members_.index)
    throw Error(Code::internal, "a goodbye came of nobody that can have left");
}

void Courier::gone(int member, const std::string& why, int from) {
  take_in();  // what it announced before it left
  cut_off_ = cut_off_ || std::find(tree_.ancestors.begin(), tree_.ancestors.end(), member) != tree_.ancestors.end();
  if (relay_) relay_->gone(), send_up();
  spread(member, why, from);
  // Idle, it must still answer what this member has announced.
  if (parent_ && tree_.parent() != member) ring(tree_.parent());
}

void Courier::leave(const std::string& why) {
  if (relay_) relay_->gone(), send_up();
  spread(members_.index, why, kSeen);
}

void Courier::spread(int leaver, const std::string& why, int except) {
  const auto sees = [&](int member) {
    return topology_.share_host(members_.ranks[size_t(member)], members_.ranks[size_t(leaver)]);
  };
  const Message message = Gone{leaver, why};
  if (parent_ && tree_.parent() != except && !sees(tree_.parent())) parent_->send(encode(message));
  for (size_t i = 0; i < children_.size(); ++i)
    if (tree_.children[i] != except && !sees(tree_.children[i])) children_[i]->send(encode(message));
}

}  // namespace lightcc
