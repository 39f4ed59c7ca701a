// What the groups of a rank share for their collectives by NCCL. Kernels of several communicators on one device must
// come in the same order on all ranks, or two of them may wait for each other for ever; and each group orders only its
// own batches. So:
// 1. Each batch that NCCL may run has a turn, and batches are queued in the order of the turns.
// 2. The turns have one order on all ranks, that of the messages of the world's coordinator: a batch of the world has
//    its turn where it is agreed on; the coordinator of another group asks for one once its batch is the next
//    (LaunchRequest), and all are told (LaunchTurn).
// 3. A turn waits for nothing but turns before it: a batch that has one is agreed on.
// 4. All that is queued on a device runs on one stream.
// Only whoever holds the progress lock calls it.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "collective/nccl.h"
#include "engine/nccl_stream.h"

namespace lightcc {

class NcclLaunches {
 public:
  // Of this rank's groups only.
  void add_turn(int group) { turns_.push_back(group); }
  bool has_turn(int group) const;                          // some time
  bool is_next(int group) const { return !turns_.empty() && turns_.front() == group; }
  void end_turn(int group);                                // what it was for is queued, or needs none
  bool ask(int group) { return asked_.insert(group).second; }  // true once a turn

  NcclStream& stream(const CudaFunctions&, int device, bool batches_copies);

  // The group is gone: its turns are dropped, and its communicators, if it had some, end when they can.
  void forget(int group, std::unique_ptr<NcclCommunicators>);
  void step();
  bool polls() const { return !leaving_.empty(); }         // step() must be called though nobody is rung
  void finish(uint64_t deadline_ns);                       // all that is left; 0: aborts

 private:
  struct Leaving {
    std::unique_ptr<NcclCommunicators> communicators;
    uint64_t deadline_ns;
  };
  std::deque<int> turns_;                                  // groups
  std::set<int> asked_;                                    // groups whose coordinator this rank is
  std::map<int, std::unique_ptr<NcclStream>> streams_;     // by device
  std::vector<Leaving> leaving_;
};

}  // namespace lightcc
