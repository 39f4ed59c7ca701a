// Finds two ranks that wait for each other for ever because they gave one operation to different process sets. No
// negotiation sees that, since each set has its own. A rank that has been blocked for long on one request and does
// nothing else says so to the world's coordinator (group 0, member 0). That is the judge: it finds two that are
// blocked on the same operation, each in a set that the other belongs to, and asks both whether they have announced
// nothing like it in the other's set. If both say so, each tells the other's set that it will not come (Contest).
// Messages in, messages out: no I/O, no clock, no threads.
#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/message.h"

namespace lightcc {

class Judge {
 public:
  // belongs(rank, group): to a group that exists.
  explicit Judge(std::function<bool(int rank, int group)> belongs) : belongs_(std::move(belongs)) {}

  // What a rank waits for, or that it has gone on. Ranks are the world's, and exist.
  void hear(const Stuck&);
  void hear(const Plea&);
  bool pending() const { return !out_.empty(); }
  std::vector<Accuse> take();  // each to its own rank

 private:
  struct Rank {
    Stuck stuck;
    int faces = -1;              // about whom it has been asked
    bool guilty = false;         // and what it has said
    std::set<std::pair<int, uint32_t>> acquitted;  // in which state of whom it has no dispute with them
  };
  using Operation = std::pair<Kind, std::string>;
  static Operation operation(const Stuck&);
  void withdraw(int rank);
  void accuse(int rank);         // looks for someone to face

  std::function<bool(int, int)> belongs_;
  std::map<int, Rank> ranks_;    // those that are blocked
  std::map<Operation, std::map<int, std::set<int>>> blocked_on_;  // by group
  std::vector<Accuse> out_;
};

}  // namespace lightcc
