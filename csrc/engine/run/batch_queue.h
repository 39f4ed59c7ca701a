// The batches of a group that its members have agreed on: batches in, completions out. Invariants:
// 1. Batches begin, start their collectives and end in the order in which they were agreed on, on all members.
// 2. On one host one batch runs at a time. Between hosts two may (hold.h), if both are all-reduces of
//    this rank's own data that are neither Adasum nor compressed, and NCCL runs neither.
// 3. A batch that changes groups begins once the engine has changed them (effect::ChangeGroups).
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/negotiate/control/hold.h"
#include "engine/run/batch_execution.h"
#include "engine/run/group_backends.h"
#include "engine/run/joined_rank.h"
#include "engine/run/nccl_run.h"
#include "engine/run/run_resources.h"
#include "engine/run/staged_run.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class BatchQueue {
 public:
  struct DoneBatch {
    std::unique_ptr<BatchExecution> batch;
    double seconds;                     // since it began, or since the one before it ended
  };

  BatchQueue(const RunResources&, std::shared_ptr<const Group>, GroupBackends&);  // which outlive it

  void add(std::vector<BatchItem>);     // it was agreed on
  void add_turn(const LaunchTurn& turn) { nccl_.add_turn(turn); }  // in the world's: nccl_run.h
  void watch();                         // GPUs that are busy, and memory pinned for others
  bool step();                          // a bounded piece of work; true if anything moved
  // The oldest batch, if it is done: it is out of the queue, and to finish its requests is among the effects.
  std::optional<DoneBatch> take_done();
  void fail_all(Code, const std::string& text);

  size_t size() const { return batches_.size() + running_.size(); }
  bool has_unbegun() const { return !batches_.empty(); }
  size_t most_running() const { return backends_.shared() ? 1 : hold::kBatchesBetweenHosts; }
  const std::vector<BatchItem>& oldest() const { return running_.empty() ? batches_[0] : running_[0]->items(); }
  int waiting_for() const { return running_.empty() ? 0 : running_[0]->waiting_for(); }  // the oldest, on which member
  // A rank in join() waits for as long as the others have work: it is no stall while that goes on.
  uint64_t waits_since(const Request& request) const {
    return request.what.kind == Kind::join ? std::max(request.submitted_ns, ended_ns_) : request.submitted_ns;
  }

  // What was queued there may not have ended; watch() looks.
  bool watches_gpu() const { return nccl_.is_busy() || staged_.is_busy(); }
  bool polls() const;                                   // for what rings nobody: NCCL, and room in its stream
  void end_nccl(uint64_t deadline_ns) { nccl_.end(deadline_ns); }

 private:
  bool begin();
  GpuWays ways_of(const std::vector<BatchItem>&);
  void hand_back(const RequestPtr&, Code, std::string text = {});

  const RunResources& shared_;
  const std::shared_ptr<const Group> group_;
  GroupBackends& backends_;
  FusionBuffer buffers_[hold::kBatchesBetweenHosts];    // the second: of a batch that begins beside another
  int buffer_ = 0;                                      // of the batch that began last
  StagedRun staged_;
  NcclRun nccl_;
  JoinedRank joined_rank_;
  std::deque<std::vector<BatchItem>> batches_;          // not begun
  std::deque<std::unique_ptr<BatchExecution>> running_;
  uint64_t ended_ns_ = 0;                               // when a batch last came to its end
};

}  // namespace lightcc
