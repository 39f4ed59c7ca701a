// Runs one batch: brings its tensors into the form that a backend takes, runs the collectives, hands the
// results back. Tensors that were fused run in place or in a buffer into which they are copied (fusion.h). Tensors of
// GPUs run on their GPU, where all is queued and nothing awaited (nccl_stream.h), or in pinned memory, slice by slice,
// of which one is exchanged while others are copied (staging.h).
#pragma once
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "collective/selector.h"
#include "engine/negotiate/control/fusion.h"
#include "engine/request/request.h"
#include "engine/run/gpu_codec.h"
#include "engine/run/nccl_stream.h"
#include "engine/run/staging.h"
#include "engine/run/tracing.h"
#include "engine/timeline/counters.h"
#include "net/group.h"
#include "net/shm/arena.h"

namespace lightcc {

// Memory for fused tensors, of one batch at a time; kept and grown.
class FusionBuffer {
 public:
  explicit FusionBuffer(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
  ~FusionBuffer() { arena_->release(data_); }
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;
  std::byte* at_least(size_t bytes);
  void clear() { arena_->release(std::exchange(data_, nullptr)), bytes_ = 0; }
  const Arena& arena() const { return *arena_; }

 private:
  std::shared_ptr<Arena> arena_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

struct BatchItem {           // a request of the batch and what the coordinator added to it
  RequestPtr request;
  std::vector<std::vector<int64_t>> rows;
  int absent = 0;            // members that have joined and take part without data; the same in the whole batch
  bool placeholder = false;  // this rank is one of them, and the request is nobody's (joined_rank.h)
  AutotuneChoices second = 0;  // by which its all-reduces choose; the same in the whole batch
};

// What a backend computes when a request asks for op and post: an average is a sum with a factor.
void set_average(Collective&, ReduceOp, double post);

// Whether that is so of the collective of each of a batch's tensors, on such a device, as all ranks know it.
bool is_each(const std::vector<BatchItem>&, DeviceKind, const std::function<bool(const Collective&)>&);

// Whether the selector has a way to run all of a batch's tensors on their GPUs; the same on all ranks.
bool runs_on_gpu(const std::vector<BatchItem>&, const Selector&);

// What a batch of tensors of GPUs runs with: neither, if there are none on this rank.
struct GpuWays {
  Staging* staging = nullptr;    // through the host
  NcclStream* nccl = nullptr;    // on the GPU; goes first
  GpuCodecRoute* codec = nullptr;  // what is compressed is so on the GPU; with one of them
};

class BatchExecution {
 public:
  // All arguments outlive the execution.
  BatchExecution(std::vector<BatchItem> items, const Group&, FusionBuffer&, const std::shared_ptr<OutputPool>&,
                 Counters&, Tracing&, const Selector&, GpuWays = {});

  // Like Work::step. may_start: a collective may be started, which all ranks do in the same order: the execution before
  // this one has started all of its own.
  bool step(bool may_start = true);
  bool all_started() const { return next_ + (work_ ? 1 : 0) == collectives_.size(); }
  bool done() const { return next_ == collectives_.size(); }
  // A member, without whom it cannot go on: this rank itself, as long as its GPU has not copied.
  int waiting_for() const { return work_ ? work_->waiting_for() : is_staged() ? group_.index() : 0; }
  bool by_nccl() const { return nccl_ != nullptr; }
  const std::string& failure() const { return failure_; }  // why its requests have no results, once it is done; ""
  const std::vector<BatchItem>& items() const { return items_; }
  uint64_t began_ns() const { return began_ns_; }  // its first collective; 0: not yet
  int64_t bytes() const { return bytes_; }         // of all that have begun
  const Collective* only_collective() const {      // nullptr: it is none, or several
    return collectives_.size() == 1 ? &collectives_[0].collective : nullptr;
  }

 private:
  struct Piece {
    const void* in;
    void* out;
    size_t bytes;
    bool between_gpus = false;  // the tensor lies on another GPU than this batch runs on
  };
  struct FusedCollective {  // one collective, and the pieces to copy before and after it
    Collective collective;
    std::vector<Piece> before, after;
    size_t staged_bytes = 0;                // of the slot that it runs in; 0: it runs in none
    size_t input_offset = 0, output_offset = 0;  // in the slot
    std::vector<StagedPiece> fetch, deliver;
    Output* result = nullptr;               // that stays in the slot until the caller takes it
    std::shared_ptr<StagingSlot> slot;
    std::vector<GpuTensor> encoded;         // if the GPU compresses it
    std::shared_ptr<GpuOutput> here;        // memory for what lies on another GPU
  };
  bool is_staged() const { return !nccl_ && items_[0].request->what.device == DeviceKind::cuda; }
  DeviceKind device() const { return nccl_ ? DeviceKind::cuda : DeviceKind::cpu; }  // where collectives run
  std::byte* fusion_buffer(size_t bytes) { return nccl_ ? nccl_->buffer(bytes) : buffer_.at_least(bytes); }
  void bring_here(const Request&, FusedCollective&);
  void plan_allreduce();
  void plan_slices(const CollectiveLayout&, const std::vector<BatchTensor>&, const FusedCollective& whole);
  bool plan_encoded(const CollectiveLayout&, const std::vector<BatchTensor>&, const FusedCollective& whole);
  void plan_staged(BatchItem&, size_t tensor, FusedCollective);
  void plan_staged_slice(BatchItem&, size_t tensor, const FusedCollective& whole, int64_t begin, int64_t most);
  void plan_staged_whole(BatchItem&, size_t tensor, FusedCollective);
  FusedCollective fused_allreduce(const CollectiveLayout&, const std::vector<BatchTensor>&, const Residuals&,
                                  std::byte* buffer) const;
  void plan_tensor(BatchItem&, size_t tensor);
  void* result(Request&, size_t tensor, Shape shape);
  bool fetch_ahead();
  void empty(FusedCollective&);
  bool copy_some(const std::vector<Piece>&);
  void queue_all(const std::vector<Piece>&);
  bool start_next(bool may_start);
  void count_compression(const Collective&);
  std::string text_of(const NoMemory&, const Collective&) const;

  std::vector<BatchItem> items_;
  std::vector<const Request*> owners_;  // by tensor; of a batch of GPUs only
  const Group& group_;
  FusionBuffer& buffer_;
  const std::shared_ptr<OutputPool>& outputs_;
  Counters& counters_;
  Tracing& tracing_;
  const Selector& selector_;
  Staging* const staging_;
  NcclStream* const nccl_;
  GpuCodecRoute* const codec_;
  std::vector<FusedCollective> collectives_;
  size_t fetched_ = 0;     // those of which the copies to the host have been queued
  size_t next_ = 0;        // in collectives_
  size_t piece_ = 0, offset_ = 0;  // in the copies of the collective
  std::unique_ptr<Work> work_;
  uint64_t began_ns_ = 0;
  int64_t bytes_ = 0;
  std::string failure_;
};

}  // namespace lightcc
