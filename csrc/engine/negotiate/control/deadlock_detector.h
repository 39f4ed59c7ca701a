// Finds ranks that wait for each other for ever in different process sets. No negotiation sees that, since each set has
// its own. Messages in, messages out: no I/O, no clock, no threads.
//
// Two ranks that gave one operation to different sets:
// 1. A rank that has been blocked for long on one request, and does nothing else, reports it to the world's coordinator
//    (group 0, member 0), where the detector is: BlockedReport. It reports too when it goes on.
// 2. The detector finds two that are blocked on the same operation, each in a set that the other belongs to, and asks
//    both whether they have announced nothing like it in the other's set: DeadlockProbe, DeadlockReply.
// 3. If both say so, it tells both, and each tells the other's set that it will not come: MembersAbsent.
//
// A cycle of ranks, each blocked on an operation that the next has not announced:
// 1. A rank that is blocked for longer asks its set's coordinator who is missing, and reports that too.
// 2. Once reports close a cycle, the detector asks all of its ranks once more. A rank that is blocked announces
//    nothing, so what they answer then, while none of them has gone on, holds for good.
// 3. If the cycle still closes, it is told: cycles. Nothing ends by it.
#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/negotiate/control/message.h"

namespace lightcc {

class DeadlockDetector {
 public:
  // belongs(rank, group): to a group that exists.
  explicit DeadlockDetector(std::function<bool(int rank, int group)> belongs) : belongs_(std::move(belongs)) {}

  // What a rank waits for, or that it has gone on. Ranks are the world's, and exist.
  void receive(const BlockedReport&);
  void receive(const DeadlockReply&);
  bool pending() const { return !out_.empty() || !cycles_.empty(); }
  const BlockedReport* blocked(int rank) const {  // on what, if it has said so; nullptr: not known
    auto it = ranks_.find(rank);
    return it == ranks_.end() ? nullptr : &it->second.report;
  }
  std::vector<DeadlockProbe> take_messages();  // each to its own rank
  // Cycles that are certain, each once: each rank waits for the next, and the last for the first.
  std::vector<std::vector<int>> take_cycles();

 private:
  struct Rank {
    BlockedReport report;
    int partner = -1;            // about whom it has been asked
    bool confirmed = false;      // it has said yes
    std::set<std::pair<int, uint32_t>> cleared;  // who, in which state, is in no deadlock with it
    uint32_t asked = 0;          // for whom it waits
  };
  struct Cycle {
    std::vector<uint32_t> needed;  // by rank: so many answers
    bool told = false;
  };
  using Operation = std::pair<Kind, std::string>;
  static Operation operation(const BlockedReport&);
  void withdraw(int rank);
  void find_partner(int rank);   // looks for one that it may be in a deadlock with
  std::vector<int> cycle_through(int rank) const;  // the shortest, or none
  void find_cycle(int rank);

  std::function<bool(int, int)> belongs_;
  std::map<int, Rank> ranks_;    // those that are blocked
  std::map<Operation, std::map<int, std::set<int>>> blocked_on_;  // by group
  std::map<std::vector<int>, Cycle> asked_cycles_;  // by its ranks, none of which has gone on since
  std::vector<DeadlockProbe> out_;
  std::vector<std::vector<int>> cycles_;
};

}  // namespace lightcc
