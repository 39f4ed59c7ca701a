// What a member does for those below it in the group's tree, if it is not the coordinator: it gathers what they have
// announced, so that the coordinator receives it once for all of them. Messages in, messages out: no I/O, no clock, no
// threads. Invariants:
// 1. The coordinator receives what it would receive without aggregators, only later.
// 2. What one member sends keeps its order wherever that matters: everything that it has sent comes before its join,
//    and a cached request whose number was given away before the announcement that repeats it in full.
// 3. What cannot be gathered (a query, a report, a refusal) passes at once, behind everything that is held: it is about
//    what was sent before.
#pragma once
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/negotiate/control/message.h"
#include "engine/negotiate/control/tree.h"

namespace lightcc {

class Aggregator {
 public:
  static constexpr int kSelf = -1;

  explicit Aggregator(const Tree&);  // outlives the aggregator

  // Something for the coordinator: from a child (its index in the tree), or kSelf, which gathers nothing. Throws
  // Error{internal} if it is about members that are not below the child.
  void receive_up(int child, UpMessage, uint64_t now_ns);
  void receive_up(int child, AggregatedRequests, uint64_t now_ns);
  void receive_down(const DownMessage&);  // from the coordinator to all, before it goes to the children
  void member_left();                     // some member has left: nothing is held any more
  bool holds() const { return due_ns_ != UINT64_MAX; }
  void pass_all();                        // passes all that is held
  void pass_expired(uint64_t now_ns);     // passes what has been held for too long
  std::vector<UpFrame> take_frames();     // to the parent, in this order

 private:
  enum class State : char { silent, held, passed };
  struct Entry {               // a request that somebody below has announced, until all have
    std::vector<State> state;  // by position
    int count = 0;             // of those that are not silent
    std::vector<AggregatedRequest> held;
    uint64_t since_ns = 0;
  };
  struct Numbered {
    std::string key;
    uint32_t generation;
  };
  void gather(AggregatedRequest, uint64_t now_ns);
  void join(AggregatedRequest);
  void pass(Entry&);
  void release(const std::string& key);  // its entry ends, and what is held of it passes
  void release(const Batch&);
  void release(const Failure&);
  void begin(const Plan&);
  void end(uint32_t plan);
  bool complete(const Entry&) const;

  const Tree& tree_;
  std::vector<int> first_;  // by child: its position
  std::unordered_map<std::string, Entry> entries_;
  std::unordered_map<uint32_t, Numbered> numbered_;            // by number
  std::unordered_map<uint32_t, std::vector<std::string>> plans_;  // by number: the keys of their requests ...
  std::unordered_set<std::string> planned_;                       // ... and of all of them
  std::unordered_set<std::string> passing_;                       // those of plans that ended, until they run: what
                                                                  // has passed of them by buckets is not in entries_
  std::unordered_map<std::string, std::vector<char>> absent_;  // by position: its announcement fails when it comes
  std::vector<char> joined_;                                   // by position
  int joined_count_ = 0;
  bool passes_all_ = false;       // a member has left
  uint64_t due_ns_ = UINT64_MAX;  // when the next may have been held for too long
  std::vector<UpFrame> out_;
};

// What a child has gathered, member by member. Throws Error{internal} if it names members that are not below it.
void for_each_request(const AggregatedRequests&, const std::vector<int>& below,
                      const std::function<void(int member, const Readiness&)>&);

}  // namespace lightcc
