// One member's part of its group's control plane: takes messages up and down the group's tree between the members and
// their coordinator, over message streams to its neighbours there and to nobody else. Only whoever holds the engine's
// progress lock calls it.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/fifo.h"
#include "engine/negotiate/control/aggregator.h"
#include "engine/negotiate/control/message_stream.h"
#include "engine/negotiate/control/tree.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

// What has come for this member. What a message says about members has been checked against the tree, but for lists of
// them.
struct MemberMessage { int member; UpMessage message; };    // at the coordinator: from a member
struct ReceivedSlot { int member; std::string bytes; };     // call_slot.h; from a neighbour
struct Departure { int member; std::string why; int from; };  // of a member on another host, as `from` has said
using ControlEvent = std::variant<MemberMessage, DownMessage, ReceivedSlot, Departure>;

class ControlPlane {
 public:
  static constexpr int kSeen = -1;

  // Everything outlives the control plane.
  ControlPlane(Peers&, const Group&);

  const Tree& tree() const { return tree_; }
  void send_up(UpMessage);             // from this member to the coordinator
  void send_down(DownMessage);         // from the coordinator to all members, or to the one that it is for
  void send_slot(std::string bytes);   // call_slot.h; to the only neighbour
  // Takes in what has come and passes on what is for others. Returns what is for this member, one event a call, and
  // nullopt when that was all. Sets *moved if anything moved.
  std::optional<ControlEvent> step(bool* moved);
  // Of that, what is there already: this member may have told it to itself.
  std::optional<ControlEvent> take_event() { return events_.pop(); }
  // Of that, what the members below have sent.
  std::optional<ControlEvent> receive_from_below();
  bool flush();  // true while messages wait for room
  void expedite() { expedite_ = true; }  // this rank was rung urgently: what is held here goes on at the next step
  bool holds() const { return aggregator_ && aggregator_->holds(); }  // it must step again soon
  void remind();  // this member has waited for a while: its parent may have nothing to do and sleep
  // A member has left: this rank has seen it (kSeen), or a neighbour has said so. Those that cannot see it are told.
  // What it announced before, receive_from_below() has returned.
  void member_left(int member, const std::string& why, int from);
  void leave(const std::string& why);        // this rank leaves, and has sent all that it had to send
  bool cut_off() const { return cut_off_; }  // from the coordinator, for ever
  // Who keeps this member from an answer to what it asked then.
  int silent_since(uint64_t asked_ns) const;

 private:
  bool receive_from_child(size_t child);  // one frame; false: there is none
  bool receive_from_parent();
  void receive_up(size_t child, UpMessage);
  void receive_up(size_t child, AggregatedRequests);
  bool forward_up();
  void receive_down(DownMessage, const std::string& bytes);  // bytes: of its frame, for whom it is passed on to
  void send_to_children(const DownMessage&, const std::string& bytes);
  void receive_left(const MemberLeft&, int from);
  void spread(int leaver, const std::string& why, int except);
  void ring(int member) { peers_.wake_urgently(group_.rank(member)); }
  void ring_parent();
  void ring_child(size_t child);

  Peers& peers_;
  const Group& group_;
  Tree tree_;
  std::unique_ptr<MessageStream> parent_;
  std::vector<std::unique_ptr<MessageStream>> children_;
  std::unique_ptr<Aggregator> aggregator_;  // of a member that has children and is not the coordinator
  uint64_t sent_up_ = 0, reminded_ = 0;
  bool parent_awaits_ring_ = false;          // for an urgent message that has found no room
  std::vector<char> children_await_ring_;
  bool expedite_ = false;
  bool cut_off_ = false;
  Fifo<ControlEvent> events_;
  size_t neighbour_ = 0;                     // at which step() goes on: a child, or behind them the parent
};

}  // namespace lightcc
