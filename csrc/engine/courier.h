// A member's place in its group's tree, at work: takes messages up and down between the members and their coordinator,
// over mailboxes to its neighbours there and to nobody else. Only whoever holds the engine's baton calls it.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/mailbox.h"
#include "engine/relay.h"
#include "engine/run.h"
#include "engine/tree.h"
#include "net/peers.h"

namespace lightcc {

// Whom it works for. What a message says about members has been checked against the tree, but for lists of them.
struct CourierOwner {
  virtual ~CourierOwner() = default;
  virtual void receive(int member, Message) = 0;  // at the coordinator: what a member says
  virtual void handle(Message) = 0;               // what the coordinator says to this member
  // A member of another host has left; `from` said so. Calls Courier::gone().
  virtual void farewell(int member, const std::string& why, int from) = 0;
};

class Courier {
 public:
  static constexpr int kSeen = -1;

  // topology: who shares a host in the world. Everything outlives the courier.
  Courier(Peers&, const Topology&, int group, const Members&, CourierOwner&);

  const Tree& tree() const { return tree_; }
  void say(Message);              // this member to the coordinator
  void tell(const Message&);      // the coordinator to all members, or to the one that it is for
  bool step();                    // takes in what has come and passes on what is others'; true if anything moved
  bool flush();                   // true while messages wait for room
  void hurry() { hurry_ = true; }  // this rank was rung urgently: what is held here goes on at the next step
  bool holds() const { return relay_ && relay_->holds(); }  // it must step again within Relay::kHoldNs
  void remind();                  // this member has waited for a while: its parent may have nothing to do and sleep
  // A member has left: this rank has seen it (kSeen), or a neighbour has said so. Those who cannot see it are told.
  void gone(int member, const std::string& why, int from);
  void leave(const std::string& why);     // this rank leaves, and has said all that it had to say
  bool cut_off() const { return cut_off_; }  // from the coordinator, for ever
  // Who keeps this member from an answer to what it asked then.
  int silent_since(uint64_t asked_ns) const;

 private:
  void take_in();                 // what the members below have said
  void hear(size_t child, Message);
  void pass_down(const std::string& bytes);
  bool send_up();
  void spread(int leaver, const std::string& why, int except);
  void ring(int member) { peers_.ring_urgently(members_.ranks[size_t(member)]); }
  void check_gone(const Gone&) const;

  Peers& peers_;
  const Topology& topology_;
  const Members& members_;
  CourierOwner& owner_;
  Tree tree_;
  std::unique_ptr<Mailbox> parent_;
  std::vector<std::unique_ptr<Mailbox>> children_;
  std::unique_ptr<Relay> relay_;  // of a member that has children and is not the coordinator
  uint64_t said_ = 0, reminded_ = 0;
  bool hurry_ = false;
  bool cut_off_ = false;
};

}  // namespace lightcc
