// Compressed all-reduces of tensors of a GPU where each host has one rank: the GPU encodes gradients into messages,
// these are exchanged in pinned memory, and the GPU decodes them into the outputs. What is left behind stays on the GPU
// (gpu_residual.h). Messages are those of the CPU, byte by byte: so each rank chooses for itself, and a rank that has
// joined, or whose GPU has no kernels, takes part by collective/compressed.h. Invariants:
// 1. No thread waits for a GPU: a callback rings the engine when messages are there to be sent, and events order all
//    else.
// 2. A word in the GPU's memory tells whether all messages were whole. It is copied to the host behind the decoding,
//    and watch() looks at it: what was decoded by then may be in use, so it ends the epoch.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collective/compressed.h"
#include "collective/selector.h"
#include "engine/run/staging.h"

namespace lightcc {

struct GpuTensor {  // of a compressed all-reduce
  const Request* request;
  const void* input;
  void* output;
};

// Each StagedRun has one. Only the thread that holds the progress lock calls it.
class CodecRun {
 public:
  // All outlive it and what it starts.
  CodecRun(const CudaFunctions& cuda, PinnedPool& pool, Staging& staging, CompressedBackend& backend)
      : cuda_(cuda), pool_(pool), staging_(staging), backend_(backend) {}

  // Whether it runs on this rank's GPU what such a row would run with that codec. tensors: as in Collective::tensors.
  bool takes(const Row&, const Codec&, const std::vector<GpuTensor>& tensors) const;
  std::unique_ptr<Work> start(const Collective& c, std::vector<GpuTensor> tensors);  // that it takes
  bool is_busy() const { return !decodings_.empty(); }  // messages are being decoded; watch() looks
  void watch();  // throws Error{internal} if a message was none

 private:
  friend class GpuCompressedAllreduce;
  struct Decoding {
    std::shared_ptr<CudaEvent> end;
    std::shared_ptr<StagingSlot> slot;
    size_t word_at;                   // in the slot
    std::vector<std::string> titles;  // of the pieces
  };

  const CudaFunctions& cuda_;
  PinnedPool& pool_;
  Staging& staging_;
  CompressedBackend& backend_;
  std::vector<Decoding> decodings_;     // in the order of their streams
};

}  // namespace lightcc
