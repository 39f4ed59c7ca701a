// What compression leaves behind of a piece, in memory of a GPU, from step to step. Invariants:
// 1. Whoever holds the Residual may use it. What is queued for it comes behind all that was queued before.
// 2. A word of its state says which of two buffers holds what is left behind; the encoder's kernels turn it.
#pragma once
#include <memory>

#include "collective/residual.h"
#include "engine/run/gpu_memory.h"
#include "engine/run/pinned_pool.h"

namespace lightcc {

// It may outlive all but the table.
class GpuResidual : public DeviceResidual {
 public:
  // Allocates. Throws Error{internal} if there is no memory. What `memory` is given from now on comes behind that.
  GpuResidual(const CudaFunctions&, std::shared_ptr<GpuMemory> memory, size_t count, bool velocity);
  ~GpuResidual() override;
  GpuResidual(const GpuResidual&) = delete;
  GpuResidual& operator=(const GpuResidual&) = delete;

  int64_t count() const override { return int64_t(count_); }
  std::unique_ptr<ResidualCopy> copy() const override;
  int device() const { return memory_->device(); }
  void* state() const { return data_; }
  float* values(int which) const { return buffer(which); }
  float* velocity(int which) const { return has_velocity_ ? buffer(2 + which) : nullptr; }

  // What a stream is given from now on comes behind all uses so far.
  void order(void* stream) const {
    if (used_) used_->order(device(), stream);
  }
  void used(std::shared_ptr<CudaEvent> end) { used_ = std::move(end); }  // behind all uses

 private:
  float* buffer(int place) const {
    return reinterpret_cast<float*>(data_ + kLine + size_t(place) * round_up(count_ * sizeof(float)));
  }

  const CudaFunctions& cuda_;
  const std::shared_ptr<GpuMemory> memory_;
  const size_t count_;
  const bool has_velocity_;
  std::byte* data_ = nullptr;
  std::shared_ptr<CudaEvent> used_;
};

// Gives a new one its first values: those of a piece in host memory, through pinned memory, part by part.
class ResidualUpload {
 public:
  ResidualUpload(const CudaFunctions& cuda, PinnedPool& pool, GpuResidual& to, const ResidualPiece& from, void* stream)
      : cuda_(cuda), pool_(pool), to_(to), from_(from), stream_(stream) {}
  bool step();  // queues at most one part, and waits for nothing; true: there is more to do

 private:
  struct Stretch {
    void* to;
    const float* from;  // nullptr: zeros
    size_t bytes;
  };
  std::vector<Stretch> stretches() const;
  StagingSlot* free_slot();  // nullptr: all are still copied from

  const CudaFunctions& cuda_;
  PinnedPool& pool_;
  GpuResidual& to_;
  const ResidualPiece& from_;
  void* const stream_;
  std::vector<std::shared_ptr<StagingSlot>> slots_;
  size_t turn_ = 0;                          // in slots_
  size_t stretch_ = 0, done_ = 0;            // so many bytes of it
};

}  // namespace lightcc
