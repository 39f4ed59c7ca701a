// Which of the requests that are ready run together, and how they are laid out: pure functions; hold.h says when.
// Invariants:
// 1. Every ready request is in exactly one bucket. Buckets stand in the order in which their first requests became
//    ready, and inside a bucket requests keep their order, or that of their addresses in shared memory.
// 2. The requests of a bucket agree on all that one collective has only one of: kind, op, factors, codec, dtype, and
//    the members that are absent.
// 3. Where a tensor begins inside its collective follows from dtypes and sizes alone, which all ranks agree on. So it
//    is the same on all ranks, whether they copy their tensors together or not.
// The engine around the negotiation uses it as well.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/types.h"

namespace lightcc {

// ---- what

// A request in private memory with more bytes runs alone: copying it together with others would cost more than a
// collective. Tensors of GPUs are copied anyway.
inline constexpr int64_t kMostCopiedBytes = 256 << 10;

// Tensors of GPUs are exchanged in slices of so many bytes, so that one is copied while another is exchanged; but for
// what needs whole tensors (Adasum, codecs). All ranks cut alike.
inline constexpr size_t kStagedSliceBytes = 4 << 20;
inline constexpr size_t kStagedSlotBytes = 2 * kStagedSliceBytes;  // with input and output, of kinds that have both

struct FusionLimits {
  int64_t bucket_bytes;             // HOROVOD_FUSION_THRESHOLD: most bytes of several requests together
  bool enabled;                     // LIGHTCC_FUSION
};

struct ReadyRequest {               // all members that are not absent have announced it
  Kind kind;
  ReduceOp op;
  double pre, post;
  Codec codec;
  std::optional<DType> dtype;       // of all its tensors; nullopt: they differ, or there are none
  int64_t bytes;                    // of all its tensors
  uintptr_t address;                // of the coordinator's own tensor in memory that ranks share; 0: in private memory
  std::span<const int32_t> absent;  // members that have joined and take part without data
  DeviceKind device = DeviceKind::cpu;
};

// Whether both may be in one batch: they agree on all that one collective has only one of, both are on the same kind of
// device, both lie in memory that ranks share, or neither does, and neither would be too large to copy.
bool may_fuse(const ReadyRequest&, const ReadyRequest&);

using Bucket = std::vector<size_t>;  // indices of the ready requests that run as one batch, in this order

std::vector<Bucket> fuse(std::span<const ReadyRequest>, FusionLimits);

// ---- how

struct BatchTensor {
  DType dtype;
  size_t bytes;
  const void* input;
  void* output;
};

struct CollectiveLayout {                // one collective of a batch: its tensors of one dtype
  struct TensorOffset { size_t tensor, offset; };
  DType dtype;
  std::vector<TensorOffset> places;             // index in the batch, and bytes from the collective's beginning
  size_t bytes;                          // to the end of the last tensor
  std::optional<size_t> buffer_offset;   // where it begins in the fusion buffer; nullopt: in place, at its first tensor
};

struct BatchLayout {
  std::vector<CollectiveLayout> collectives;
  size_t buffer_bytes;                   // of the fusion buffer
};

// Lays out a batch of allreduces: one collective for each dtype, and nothing for tensors without elements. Several
// tensors run in place only if each is its own output, they already lie at their offsets, and all of that memory, with
// what lies between them, may be used so.
BatchLayout lay_out(std::span<const BatchTensor>,
                    const std::function<bool(const void* begin, size_t bytes)>& may_be_used);

}  // namespace lightcc
