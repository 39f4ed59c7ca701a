// Pinned memory through which tensors of GPUs go by way of the host, in pieces: slots. Pinning costs more than copying,
// so a rank keeps slots, for all of its process sets. Invariants:
// 1. A slot that nobody holds is used again only when the copies from and to it are done.
// 2. Slots stay in the pool while all of them together are at most `most_bytes`. Those beyond that go when nobody holds
//    them and another is asked for, or trim() is called; and all go with the pool, which belongs to an epoch.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda_objects.h"
#include "engine/request/request.h"
#include "net/shm/arena.h"

namespace lightcc {

// In memory that the ranks of a host share. Any thread may hold one and drop it.
class StagingSlot : public GpuOutput {
 public:
  // device: through which it is pinned, for all.
  StagingSlot(const CudaFunctions&, std::shared_ptr<Arena>, int device, size_t bytes);
  ~StagingSlot() override;  // it is idle
  StagingSlot(const StagingSlot&) = delete;
  StagingSlot& operator=(const StagingSlot&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void copy_to(const DevicePlace&, void* tensor, const void* from, size_t bytes) override;
  void expect(std::shared_ptr<CudaEvent> end_of_copies);
  bool idle();  // all copies are done
  // How often the pool has given it away: of two holders, which came later. Only under the progress lock.
  uint64_t turn() const { return turn_; }

 private:
  friend class PinnedPool;
  const CudaFunctions& cuda_;
  const std::shared_ptr<Arena> arena_;
  const int device_;
  const size_t bytes_;
  std::byte* const data_;
  uint64_t turn_ = 0;
  std::mutex mutex_;
  std::vector<std::shared_ptr<CudaEvent>> copies_;
};

// Only whoever holds the progress lock calls it.
class PinnedPool {
 public:
  PinnedPool(std::shared_ptr<Arena> arena, size_t most_bytes) : arena_(std::move(arena)), most_bytes_(most_bytes) {}
  ~PinnedPool();  // slots that are in use live on
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // A slot of at least so many bytes.
  std::shared_ptr<StagingSlot> take(const CudaFunctions&, int device, size_t bytes);
  bool is_over() const { return bytes_ > most_bytes_; }  // it has more than it keeps
  void trim() { shrink_to(most_bytes_); }
  size_t bytes() const { return bytes_; }                // pinned, in use or not

 private:
  void shrink_to(size_t bytes);

  const std::shared_ptr<Arena> arena_;
  const size_t most_bytes_;
  std::vector<std::shared_ptr<StagingSlot>> slots_;  // the one that was used last is the last
  size_t bytes_ = 0;                                 // of all of them
};

}  // namespace lightcc
