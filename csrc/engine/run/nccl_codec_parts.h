// The parts of one compressed all-reduce by NCCL, and where they are on the GPU: in the tensors themselves or in memory
// of the stream, which two parts after each other share with all others (nccl_codec_layout.h).
#pragma once
#include <vector>

#include "engine/run/gpu_codec.h"
#include "engine/run/nccl_codec_layout.h"
#include "engine/run/nccl_stream.h"

namespace lightcc {

class NcclCodecParts {
 public:
  // All outlive it. The nodes are even ones.
  NcclCodecParts(DType, const CompressedLayout&, const std::vector<GpuTensor>&, const NodeLinks&, NcclStream&);

  // Memory of the stream for all parts, from what is queued now on, and behind them for `more` bytes. Returns these.
  // Throws Error{internal} if there is none. The rest needs it.
  std::byte* take_memory(size_t more);

  size_t size() const { return parts_.size(); }
  size_t begin(size_t p) const { return layout_.parts[p].begin; }  // its tensors
  size_t end(size_t p) const { return layout_.parts[p].end; }
  size_t share_bytes(size_t p) const { return parts_[p].share_bytes; }
  size_t message_bytes(size_t p) const { return parts_[p].message_bytes; }

  // The members' shares, side by side.
  const std::byte* inputs(size_t p) const;
  std::byte* outputs(size_t p) const;
  std::byte* own_share(size_t p) const;  // of the outputs
  std::byte* own_shard(size_t p, size_t tensor) const;
  std::byte* messages(size_t p) const;   // of all nodes
  std::byte* own_message(size_t p) const;

  // Queues what brings the tensors into the inputs, and the outputs into the tensors, where they are not there.
  void copy_in(size_t p) { copy(p, true); }
  void copy_out(size_t p) { copy(p, false); }

 private:
  struct PlacedPart : NcclPart {
    bool copies;                  // its tensors, into shares and back
    std::byte* memory = nullptr;
  };
  size_t members() const { return links_.members().size(); }
  bool is_here(size_t tensor) const { return tensors_[tensor].request->place.device == stream_.device(); }
  void copy(size_t p, bool in);

  const CompressedLayout& layout_;
  const std::vector<GpuTensor>& tensors_;
  const NodeLinks& links_;
  NcclStream& stream_;
  std::vector<PlacedPart> parts_;
};

}  // namespace lightcc
