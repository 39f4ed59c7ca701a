// Compressed all-reduces of tensors of GPUs by NCCL, where all nodes have equally many members, more than one: a
// reduce-scatter among the members of a node; the owner of a shard encodes the sum on its GPU; the owners of a lane
// gather each other's messages; each decodes them; an all-gather in the node. The shards, messages and sums are those
// of collective/compressed.h, for which this stands in; its header has the sources. Invariants:
// 1. All members take this way, or none: that GPUs have kernels is agreed on once (nccl_codec_setup.h), and that all
//    have the memory before each all-reduce, by one word on the host. So all launch the same.
// 2. What is among the members of a node, and all that a GPU computes, runs on one stream; what is exchanged between
//    nodes on another one. So that goes on while the next part is reduced and encoded, and the one before it decoded
//    and gathered. A device may have to run a kernel of NCCL of each at the same time.
// 3. All is queued, and nobody waits. A part has the memory that the last part but one had: what is queued for it comes
//    behind all that was queued for that one.
// 4. A message that is none is found on the GPU, and ends the epoch (DecodingErrors).
#pragma once
#include <deque>
#include <memory>
#include <vector>

#include "collective/compressed.h"
#include "collective/nccl.h"
#include "engine/run/gpu_codec.h"
#include "engine/run/nccl_stream.h"

namespace lightcc {

class NcclCodecRun : public Backend, public GpuCodecRoute {
 public:
  // host: does the same on the host. nodes: of the group, even ones. All outlive it and what it starts.
  NcclCodecRun(CompressedBackend& host, const Hosts& nodes, const Selector& selector)
      : host_(host), nodes_(nodes), selector_(selector) {}

  const char* name() const override { return "nccl_compressed"; }
  bool suits(const Collective&) const;  // whether it accepts such ones once it is connected
  bool accepts(const Collective& c) const override { return communicators_ && suits(c); }
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;  // throws: it runs tensors where they are

  bool takes(const Row& row, const Codec&, const std::vector<GpuTensor>&) const override { return row.backend == this; }
  std::unique_ptr<Work> start(const Collective&, std::vector<GpuTensor>) override;

  // Accepts nothing until then. All must outlive it, and there be communicators in a node and between nodes.
  // cross: the stream for what is between nodes.
  void connect(const CudaFunctions&, PinnedPool&, NcclCommunicators&, NcclStream&, NcclStream& cross);
  DecodingErrors& errors() { return errors_; }

 private:
  friend class NcclCompressedAllreduce;
  bool has_room();

  CompressedBackend& host_;
  const Hosts& nodes_;
  const Selector& selector_;
  const CudaFunctions* cuda_ = nullptr;
  PinnedPool* pool_ = nullptr;
  NcclCommunicators* communicators_ = nullptr;
  NcclStream* stream_ = nullptr;
  NcclStream* cross_ = nullptr;
  std::deque<std::shared_ptr<CudaEvent>> encoded_;  // of parts that may not have run
  DecodingErrors errors_;
};

}  // namespace lightcc
