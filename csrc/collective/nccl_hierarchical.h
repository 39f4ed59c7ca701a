// 2D all-reduce of GPUs by NCCL, where all nodes have equally many members: a reduce-scatter among the members of a
// node, an all-reduce among those that have the same part of it, one a node, and an all-gather in the node. After Jia
// et al. 2018, as in hierarchical.h.
//
// 1. A vector is cut into chunks, and these into parts that begin at multiples of 16 bytes. What the members of a node
//    cannot share so, a few elements at the end, is reduced among all members at once.
// 2. All that is among the members of a node runs on the stream that the backend is given, and all between nodes on one
//    of its own. So a chunk is exchanged between nodes while the one behind it is reduced, and the one before it
//    gathered, in each node.
// 3. All members launch the kernels of both streams in the same order. A device may have to run one of each at the
//    same time: if it ran only one at a time, two members could choose different ones and wait for each other.
// 4. A member writes, in the output, only its own part until the all-gather. So the output may be the input.
#pragma once
#include <array>
#include <optional>

#include "collective/nccl.h"

namespace lightcc {

class NcclHierarchicalBackend : public Backend {
 public:
  struct Limits {
    int64_t least_bytes = 1 << 20;  // of smaller ones the launches cost more than the network
    int64_t chunk_bytes = 8 << 20;
  };

  explicit NcclHierarchicalBackend(const Limits& limits) : limits_(limits) {}
  const char* name() const override { return "nccl_2d"; }
  // Accepts nothing until then. All must outlive this, and there be communicators for 2D.
  void connect(const CudaFunctions&, NcclCommunicators&, void* stream);
  bool accepts(const Collective&) const override;
  // The one before it must be done.
  std::unique_ptr<Work> start(const Collective&, const Algorithm*) override;

 private:
  class Allreduce;
  struct Phase {                      // kernels that those of the next phase follow
    Phase(const CudaFunctions&, int device, void* stream);
    void* stream;
    std::array<CudaEvent, 2> launched;  // of the last two chunks
  };

  const Limits limits_;
  const CudaFunctions* cuda_ = nullptr;
  NcclCommunicators* communicators_ = nullptr;
  std::optional<CudaStream> cross_stream_;
  std::optional<Phase> reduced_, exchanged_;
};

}  // namespace lightcc
