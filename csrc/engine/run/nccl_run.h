// How a group runs tensors of GPUs by NCCL, on their GPU. Invariants:
// 1. The first batch of tensors of GPUs that all members have lets them settle whether they use NCCL (nccl_setup.h).
//    They settle it once; and whether it runs compressed all-reduces, by the first of these (nccl_codec_setup.h).
// 2. All members take the streams by the same turns, as each runs the same batches by NCCL.
// 3. What NCCL may run has a turn among all groups of the rank (nccl_launches.h), as all members know alike. A batch of
//    the world has one in any case: when it is agreed on, that may not be settled yet. Turns are noted where their
//    messages come, and not as effects, since their order is that of the messages.
#pragma once
#include <memory>
#include <vector>

#include "engine/negotiate/control/message.h"
#include "engine/request/group_table.h"
#include "engine/run/batch_execution.h"
#include "engine/run/group_backends.h"
#include "engine/run/nccl_codec_run.h"
#include "engine/run/nccl_codec_setup.h"
#include "engine/run/nccl_launches.h"
#include "engine/run/nccl_setup.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class NcclRun {
 public:
  // The arguments outlive it.
  NcclRun(const Config&, const Group&, GroupBackends&, PinnedPool&, NcclLaunches&, const GroupTable&);

  bool settles(const std::vector<BatchItem>&) const;    // whether by this batch the members settle one or the other
  bool settle(const Request& first);                    // a step of that; true if anything moved

  // The world's, in the order of its messages: a batch was agreed on, or another group has a turn.
  void agreed(const std::vector<BatchItem>&);
  void add_turn(const LaunchTurn&);
  bool takes_turn(const std::vector<BatchItem>&) const;
  bool has_turn() const { return launches_.has_turn(group_.id()); }
  bool is_next() const { return launches_.is_next(group_.id()); }
  void end_turn() { launches_.end_turn(group_.id()); }

  bool is_full() const;                                 // the next batch's stream has no room, or the first
  NcclStream& next_stream();
  NcclStream& codec_stream() { return *streams_[0]; }   // of compressed batches: they take no turn
  void finish(Request&);                                // that ran by it, or has failed after that

  bool is_busy() const { return is_busy_; }             // what was queued may not have ended; watch() looks
  void watch();                                         // throws if something that was queued has failed
  bool is_settling() const { return setup_ || codec_setup_; }
  // No collective is run by it any more. What was queued may end until the deadline; 0: it is aborted. Does not wait:
  // the NcclLaunches does.
  void end(uint64_t deadline_ns);

 private:
  bool settles_codec(const std::vector<BatchItem>&) const;
  bool settle_codec();

  const Config& config_;
  const Group& group_;
  GroupBackends& backends_;
  PinnedPool& pool_;
  NcclLaunches& launches_;                              // of all groups of this rank
  const GroupTable& groups_;
  bool is_settled_ = false, is_codec_settled_ = false;
  std::unique_ptr<NcclSetup> setup_;                    // while they settle it
  std::unique_ptr<NcclCommunicators> communicators_;    // if they use it
  std::unique_ptr<NcclCodecSetup> codec_setup_;         // while they settle that; of the communicators
  std::vector<NcclStream*> streams_;                    // of launches_, one a communicator, and then never empty
  size_t turn_ = 0;                                     // the stream of the next batch
  bool is_busy_ = false;                                // when last looked at
  uint64_t watched_ns_ = 0;
};

}  // namespace lightcc
