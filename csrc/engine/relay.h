// What a member does for those below it in the group's tree, if it is not the coordinator: it gathers what they have
// announced, so that the coordinator hears it once for all of them. Messages in, messages out: no I/O, no clock, no
// threads.
//
// What the coordinator is told must be what it would hear without relays, but for time. So what one member says keeps
// its order wherever that matters: before a join everything that this member has said; before a recall is made good by
// an announcement, the recall. What is not gathered passes at once, and so does everything that is held when it does:
// whoever asks or complains speaks of what was said before.
#pragma once
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/message.h"
#include "engine/tree.h"

namespace lightcc {

class Relay {
 public:
  // What has been held for so long passes as it is: the coordinator can tell who is missing.
  static constexpr uint64_t kHoldNs = 100'000'000;
  static constexpr int kSelf = -1;

  explicit Relay(const Tree&);  // outlives the relay

  // Something for the coordinator: from a child (its index in the tree), or kSelf. Throws Error{internal} on what no
  // child sends, or not about members that are not below it.
  void hear(int child, Message, uint64_t now_ns);
  void tell(const Message&);    // something that the coordinator says to all, before it goes to the children
  void gone();                  // some member has left: nothing is held any more
  bool holds() const { return due_ns_ != UINT64_MAX; }
  void hurry();                 // passes all that is held
  void look(uint64_t now_ns);   // passes what has been held for too long
  std::vector<Message> take();  // to the parent, in this order

 private:
  enum class State : char { silent, held, passed };
  struct Entry {               // a request that somebody below has announced, until all have
    std::vector<State> state;  // by place
    int count = 0;             // of those that are not silent
    std::vector<Part> held;
    uint64_t since_ns = 0;
  };
  struct Known {
    std::string key;
    uint32_t generation;
  };
  void gather(Part, uint64_t now_ns);
  void join(Part);
  void pass(Entry&);
  bool complete(const Entry&) const;

  const Tree& tree_;
  std::vector<int> first_;  // by child: its place
  std::unordered_map<std::string, Entry> entries_;
  std::unordered_map<uint32_t, Known> known_;                     // by number
  std::unordered_map<std::string, std::vector<char>> contested_;  // by place: its announcement fails when it comes
  std::vector<char> joined_;                                      // by place
  int joined_count_ = 0;
  bool passing_ = false;          // a member has left
  uint64_t due_ns_ = UINT64_MAX;  // when the next may have been held for too long
  std::vector<Message> out_;
};

// What a child has gathered, member by member. Throws Error{internal} if it names members that are not below it.
void each_said(const Said&, const std::vector<int>& below,
               const std::function<void(int member, const std::variant<Announce, Recall>&)>&);

}  // namespace lightcc
