// What the groups of a rank share for their collectives by NCCL. Kernels of several communicators on one device must
// come in the same order on all ranks, or two of them may wait for each other for ever; and each group orders only its
// own batches. So:
// 1. Each batch that NCCL may run has a turn, and batches are queued in the order of the turns. Communicators are made
//    in the turn of the first.
// 2. The turns have one order on all ranks, that of the messages of the world's coordinator: a batch of the world has
//    its turn where it is agreed on; the coordinator of another group asks for one once its batch is the next
//    (LaunchRequest), and its members are told (LaunchTurn).
// 3. A turn waits for nothing but turns before it: a batch that has one is agreed on.
// 4. All that is queued on a device runs on one stream; or on a few (HOROVOD_NUM_NCCL_STREAMS), and what compressed
//    all-reduces exchange between nodes on one more. Then the device must be able to run a kernel of each at a time, as
//    members may come to them in different orders.
// Only whoever holds the progress lock calls it.
#pragma once
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "collective/nccl.h"
#include "engine/run/nccl_stream.h"

namespace lightcc {

class NcclLaunches {
 public:
  static constexpr size_t kBetweenNodes = size_t(-1);  // the number of a device's stream for what is between nodes
  // How long communicators that end may run what they have queued, and how long one waits for their abortion.
  static constexpr uint64_t kQueuedNs = 5'000'000'000, kAbortNs = 500'000'000;

  // Turns of groups that this rank belongs to.
  void add_turn(int group) { turns_.push_back(group); }
  bool has_turn(int group) const;                          // some time
  bool is_next(int group) const { return !turns_.empty() && turns_.front() == group; }
  void end_turn(int group);                                // what it was for is queued, or needs none
  bool ask(int group) { return asked_.insert(group).second; }  // true once a turn

  NcclStream& stream(const CudaFunctions&, int device, size_t number, bool batches_copies);

  void forget(int group);                                  // it is gone, and its turns with it
  void add_ending(std::future<void> communicators);        // of a group; they end by themselves
  void finish(uint64_t deadline_ns);                       // waits for those; no turn is left

 private:
  std::deque<int> turns_;                                  // groups
  std::set<int> asked_;                                    // groups whose coordinator this rank is
  std::map<std::pair<int, size_t>, std::unique_ptr<NcclStream>> streams_;  // by device and number
  std::vector<std::future<void>> endings_;
};

}  // namespace lightcc
