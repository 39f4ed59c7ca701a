// The stream of a GPU on which collectives run there by NCCL, and the memory that they need beside the tensors'. All is
// queued, and nobody waits. Invariants:
// 1. What is queued here for a request runs after what the request's stream had when it was submitted.
// 2. Request::delivered is reached when all that was queued for it has run.
#pragma once
#include <deque>
#include <memory>
#include <span>

#include "engine/run/gpu_memory.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class NcclStream {
 public:
  // batches_copies: HOROVOD_BATCH_D2D_MEMCOPIES.
  NcclStream(const CudaFunctions& cuda, int device, bool batches_copies)
      : cuda_(cuda),
        device_(device),
        batches_copies_(batches_copies),
        memory_(std::make_shared<GpuMemory>(cuda, device)) {}
  ~NcclStream();
  NcclStream(const NcclStream&) = delete;
  NcclStream& operator=(const NcclStream&) = delete;

  int device() const { return device_; }
  void* get() const { return memory_->stream(); }
  const std::shared_ptr<GpuMemory>& memory() const { return memory_; }  // for what may outlive this
  void follow(const Request&);
  // For fused tensors, from what is queued now on; kept and grown.
  std::byte* buffer(size_t bytes);
  // What that one is given may use it too. Unless it failed half-way, this goes on behind it.
  void share_buffer(const NcclStream& other) { other_ = other.memory_; }
  void copy(const CudaCopy&);                      // either side may lie on another GPU
  void copy_all(std::span<const CudaCopy>);        // neither side does
  std::shared_ptr<GpuOutput> output(size_t bytes, void** memory);
  void finish(Request&);                           // all that was queued for it
  bool idle() const { return !used_ || (end_ && end_->reached()); }  // all that was queued has run
  // CUDA makes a thread wait that queues too much, and this one must not.
  bool has_room();

 private:
  const CudaFunctions& cuda_;
  const int device_;
  const bool batches_copies_;
  const std::shared_ptr<GpuMemory> memory_;  // outputs may outlive this
  void* buffer_ = nullptr;
  size_t buffer_bytes_ = 0;
  std::shared_ptr<GpuMemory> other_;  // whose stream may use the buffer; nullptr: none
  std::deque<std::shared_ptr<CudaEvent>> ends_;  // of batches that may not have run
  std::shared_ptr<CudaEvent> followed_;  // the last, which requests of one call share
  bool used_ = false;
  std::shared_ptr<CudaEvent> end_;  // of all that was queued; nullptr: nobody has asked since
};

}  // namespace lightcc
