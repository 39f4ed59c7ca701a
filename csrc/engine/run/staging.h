// How tensors of GPUs take part in collectives of the host: a GPU copies them into pinned memory (fetch), they are
// exchanged there, and it copies them back (deliver). Copies are queued on streams of our own, beside the program's,
// and nobody waits for a GPU: a host callback of CUDA rings the engine when copies are done that it waits for. No
// stream of the program's waits for a callback, which takes longer than a small copy. Invariants:
// 1. A copy from or to a tensor runs after what the tensor's stream had when its request was submitted.
// 2. Request::delivered is reached when all copies to it have run.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/run/gpu_memory.h"
#include "engine/run/pinned_pool.h"

namespace lightcc {

struct StagedPiece {             // of a tensor of `request`, and where it lies in a slot
  const Request* request;
  void* tensor;
  size_t offset, bytes;
};

// Each StagedRun has one. Only the thread that holds the progress lock calls it.
class Staging {
 public:
  // ring: wakes the engine; called by threads of CUDA.
  Staging(const CudaFunctions&, std::shared_ptr<PinnedPool>, std::function<void()> ring);
  ~Staging();  // ring is not called any more
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // A slot of at least so many bytes. nullptr: this group has enough of them in use, and the engine will be rung.
  std::shared_ptr<StagingSlot> take(int device, size_t bytes);
  // The same for what the program will read later, maybe much later: there is always one.
  std::shared_ptr<StagingSlot> take_for_results(int device, size_t bytes);
  // Memory of the GPU for results that are delivered in slices.
  std::shared_ptr<GpuOutput> output(int device, size_t bytes, void** memory);
  // From memory of the GPU to memory of output(), in the order of what is delivered.
  void keep(const Request&, void* to, const void* from, size_t bytes);
  void fetch(StagingSlot&, const std::vector<StagedPiece>&);  // the engine is rung when all is there
  // rings: the engine waits for the slot.
  void deliver(StagingSlot&, const std::vector<StagedPiece>&, bool rings);
  // For what runs on a GPU before and after an exchange of less than the tensors (codec_run.h): the first stream is for
  // what the engine waits for, the second for outputs, which finish() waits for.
  struct CodecStreams {
    void* in;
    std::shared_ptr<GpuMemory> out;
  };
  CodecStreams codec_streams(int device);
  void ring_behind_in(int device) { ring_behind(device, streams(device).in.get(), false); }
  void finish(Request&, bool failed);          // failed: its stream goes on behind all copies from its tensors

 private:
  struct Bell {
    std::mutex mutex;
    std::function<void()> ring;
    std::atomic<int> asked{0};  // callbacks that are still to come for a free slot
  };
  struct Streams {
    Streams(const CudaFunctions& cuda, int device)
        : in(cuda, device), out(std::make_shared<GpuMemory>(cuda, device)) {}
    CudaStream in;
    std::shared_ptr<GpuMemory> out;        // outputs may outlive this
    std::shared_ptr<CudaEvent> delivered;  // all that `out` has been given; nullptr: nobody has asked since
  };
  struct Taken {
    std::weak_ptr<StagingSlot> slot;
    uint64_t turn;
  };
  Streams& streams(int device) { return streams_.try_emplace(device, cuda_, device).first->second; }
  bool is_in_use(const Taken&, bool* is_emptied) const;
  void copy(StagingSlot&, const std::vector<StagedPiece>&, bool in, bool rings);
  void ring_behind(int device, void* stream, bool for_slot);

  const CudaFunctions& cuda_;
  const std::shared_ptr<PinnedPool> pool_;
  const std::shared_ptr<Bell> bell_ = std::make_shared<Bell>();
  std::map<int, Streams> streams_;                     // by device
  std::vector<Taken> taken_;                           // by take(), and maybe free again
};

}  // namespace lightcc
