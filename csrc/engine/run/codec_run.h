// Compressed all-reduces of tensors of a GPU where each host has one rank: the GPU encodes gradients into messages,
// these are exchanged in pinned memory, and the GPU decodes them into the outputs. What is left behind stays on the GPU
// (gpu_residual.h). Messages are those of the CPU, byte by byte: so each rank chooses for itself, and a rank that has
// joined, or whose GPU has no kernels, takes part by collective/compressed.h. Invariants:
// 1. No thread waits for a GPU: a callback rings the engine when messages are there to be sent, and events order all
//    else.
// 2. A message that is none is found on the GPU, and ends the epoch (DecodingErrors).
#pragma once
#include <memory>
#include <vector>

#include "collective/compressed.h"
#include "engine/run/gpu_codec.h"
#include "engine/run/staging.h"

namespace lightcc {

// Each StagedRun has one. Only the thread that holds the progress lock calls it.
class CodecRun : public GpuCodecRoute {
 public:
  // All outlive it and what it starts.
  CodecRun(const CudaFunctions& cuda, PinnedPool& pool, Staging& staging, CompressedBackend& backend)
      : cuda_(cuda), pool_(pool), staging_(staging), backend_(backend) {}

  bool takes(const Row&, const Codec&, const std::vector<GpuTensor>& tensors) const override;
  std::unique_ptr<Work> start(const Collective& c, std::vector<GpuTensor> tensors) override;
  DecodingErrors& errors() { return errors_; }

 private:
  friend class GpuCompressedAllreduce;
  const CudaFunctions& cuda_;
  PinnedPool& pool_;
  Staging& staging_;
  CompressedBackend& backend_;
  DecodingErrors errors_;
};

}  // namespace lightcc
