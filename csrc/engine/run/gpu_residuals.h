// What is left behind of the tensors of one compressed all-reduce, on its way to a GPU and while the encoder uses it
// there. The tensors are taken in their order: made ready, encoded, let go.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "engine/run/gpu_codec.h"
#include "engine/run/gpu_residual.h"

namespace lightcc {

class GpuResiduals {
 public:
  // All but the memory outlive it. c: a rank has one shard of each tensor. memory: where they are allocated. stream:
  // where they are used; it goes on behind what is allocated.
  GpuResiduals(const CudaFunctions&, PinnedPool&, const Collective& c, const CompressedLayout&,
               const std::vector<GpuTensor>&, int node, int nodes, void* stream, std::shared_ptr<GpuMemory> memory);
  ~GpuResiduals() { let_go(held_); }
  GpuResiduals(const GpuResiduals&) = delete;
  GpuResiduals& operator=(const GpuResiduals&) = delete;

  // A bounded piece of work, which waits for nothing: those of all tensors before `end` are held, and cut and on the
  // GPU as they are to be; or there is no memory for one of them. true: there is more to do.
  bool step(size_t end);
  std::optional<size_t> refused() const { return refused_; }  // there is no memory for this tensor; step() stays so
  void refuse(size_t tensor, const Error&);  // there is none for what else it needs; says why in the log
  void follow_allocations();                 // the stream goes on behind them

  // Of a tensor that is ready, and counted as exchanged by that route. body: of its message.
  CudaEncode encoding_of(size_t tensor, CodecRoute, const void* gradient, std::byte* body);
  void used(size_t begin, size_t end, const std::shared_ptr<CudaEvent>&);  // behind what was queued for these tensors
  void let_go(size_t end);  // those before `end`, which need be ready no more

 private:
  const CompressedShard& shard(size_t t) const { return layout_.tensors[t].shards[0]; }
  GpuResidual& gpu_residual(size_t t) const {
    return static_cast<GpuResidual&>(*c_.residuals[t]->pieces()[0].device);
  }
  bool has_velocity() const { return c_.codec.momentum > 0; }
  bool make_ready(size_t tensor);

  const CudaFunctions& cuda_;
  PinnedPool& pool_;
  const Collective& c_;
  const CompressedLayout& layout_;
  const std::vector<GpuTensor>& tensors_;
  const int node_, nodes_;
  void* const stream_;
  const std::shared_ptr<GpuMemory> memory_;
  size_t gone_ = 0, ready_ = 0, held_ = 0;  // so many tensors: let go; ready; taken hold of
  std::optional<size_t> refused_;
  std::shared_ptr<GpuResidual> arriving_;   // of tensor ready_
  std::unique_ptr<ResidualUpload> upload_;  // into that
};

}  // namespace lightcc
