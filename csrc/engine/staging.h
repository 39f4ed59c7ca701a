// How tensors of GPUs take part in collectives of the host: a GPU copies them into pinned memory (fetch), they are
// exchanged there, and it copies them back (deliver). Copies are queued on streams of our own, beside the program's,
// and nobody waits for a GPU: a host callback behind each copy rings the engine. Invariants:
// 1. A copy from or to a tensor runs after what the tensor's stream had when its request was submitted.
// 2. What that stream is given after the request is done, or has failed, runs after all copies from and to it.
// 3. A slot that nobody holds is used again only when the copies from and to it are done.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda_objects.h"
#include "engine/request.h"
#include "net/shm/arena.h"

namespace lightcc {

// Pinned memory that the ranks of a host share. Free for the next user when nobody else holds it and it is idle.
class StagingSlot : public GpuOutput {
 public:
  // Of at least so many bytes. device: through which it is pinned, for all.
  StagingSlot(const CudaFunctions&, std::shared_ptr<Arena>, int device, size_t bytes);
  ~StagingSlot() override;  // it is idle
  StagingSlot(const StagingSlot&) = delete;
  StagingSlot& operator=(const StagingSlot&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void copy_to(const DevicePlace&, void* tensor, const void* from, size_t bytes) override;
  void expect(std::unique_ptr<CudaEvent> end_of_copies);
  bool idle();  // all copies are done

 private:
  const CudaFunctions& cuda_;
  const std::shared_ptr<Arena> arena_;
  const int device_;
  const size_t bytes_;
  std::byte* const data_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CudaEvent>> copies_;
};

struct StagedPiece {             // of a tensor of `request`, and where it lies in a slot
  const Request* request;
  void* tensor;
  size_t offset, bytes;
};

// Of one group engine; only whoever holds the progress lock calls it.
class Staging {
 public:
  // ring: wakes the engine; called by threads of CUDA.
  Staging(const CudaFunctions&, std::shared_ptr<Arena>, std::function<void()> ring);
  ~Staging();  // ring is not called any more; slots that are in use live on
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // Of at least so many bytes. nullptr: all are in use, and the engine will be rung.
  std::shared_ptr<StagingSlot> take(int device, size_t bytes);
  // The same for what the program will read later, maybe much later: there is always one.
  std::shared_ptr<StagingSlot> take_for_results(int device, size_t bytes);
  void fetch(StagingSlot&, const std::vector<StagedPiece>&);
  void deliver(StagingSlot&, const std::vector<StagedPiece>&);
  // Orders the request's stream behind all that was copied: of one that is done, what was delivered.
  void finish(Request&, bool failed);

 private:
  struct Bell {
    std::mutex mutex;
    std::function<void()> ring;
  };
  struct Streams {
    Streams(const CudaFunctions& cuda, int device) : in(cuda, device), out(cuda, device) {}
    CudaStream in, out;
    std::shared_ptr<CudaEvent> delivered;  // all that `out` has been given; nullptr: nobody has asked since
    std::vector<void*> behind;             // streams that are ordered behind that
  };
  using Slots = std::vector<std::shared_ptr<StagingSlot>>;
  Streams& streams(int device) { return streams_.try_emplace(device, cuda_, device).first->second; }
  static std::shared_ptr<StagingSlot> find(Slots&, size_t bytes);
  void copy(StagingSlot&, const std::vector<StagedPiece>&, bool in);
  void ring_behind(int device, void* stream);

  const CudaFunctions& cuda_;
  const std::shared_ptr<Arena> arena_;
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
  std::map<int, Streams> streams_;  // by device
  Slots slots_, results_;
};

}  // namespace lightcc
