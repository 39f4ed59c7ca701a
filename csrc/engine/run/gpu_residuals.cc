#include "engine/run/gpu_residuals.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "collective/piece_codec.h"

namespace lightcc {

GpuResiduals::GpuResiduals(const CudaFunctions& cuda, PinnedPool& pool, const Collective& c,
                           const CompressedLayout& layout, const std::vector<GpuTensor>& tensors, int node, int nodes,
                           void* stream, std::shared_ptr<GpuMemory> memory)
    : cuda_(cuda),
      pool_(pool),
      c_(c),
      layout_(layout),
      tensors_(tensors),
      node_(node),
      nodes_(nodes),
      stream_(stream),
      memory_(std::move(memory)) {}

bool GpuResiduals::step(size_t end) {
  for (; held_ < end; ++held_)
    if (!c_.residuals[held_]->try_hold()) return true;  // who copies it rings nobody
  for (; !refused_ && ready_ < end; ++ready_)
    if (!make_ready(ready_)) return true;
  return false;
}

// false: there is more to do. Else what is left behind of the tensor is on this GPU, cut as it is now, or refused.
bool GpuResiduals::make_ready(size_t t) {
  Residual& residual = *c_.residuals[t];
  const int64_t elements = layout_.tensors[t].place.count;
  const std::vector<Residual::Range> ranges{{shard(t).first, shard(t).count}};
  const auto cut = [&] { residual.cut(elements, node_, nodes_, ranges, has_velocity()); };
  if (upload_) {
    if (upload_->step()) return false;
    ResidualPiece& piece = residual.pieces()[0];
    piece.values = {};
    piece.velocity = {};
    piece.device = std::exchange(arriving_, nullptr);
    upload_ = nullptr;
    return true;
  }
  const bool is_cut = residual.is_cut(elements, ranges, has_velocity());
  if (is_cut && residual.pieces()[0].device && gpu_residual(t).device() == memory_->device()) {
    cut();  // which node this is
    return true;
  }
  if (residual.step_home()) return false;
  cut();
  if (shard(t).count == 0) return true;
  try {
    arriving_ = std::make_shared<GpuResidual>(cuda_, memory_, size_t(shard(t).count), has_velocity());
  } catch (const Error& error) {
    refuse(t, error);
    return true;
  }
  follow_allocations();
  upload_ = std::make_unique<ResidualUpload>(cuda_, pool_, *arriving_, residual.pieces()[0], stream_);
  return false;
}

// What CUDA says, only this rank knows.
void GpuResiduals::refuse(size_t t, const Error& error) {
  refused_ = t;
  log(Level::warning, tensors_[t].request->title() + " cannot be compressed on the GPU: " + error.what());
}

void GpuResiduals::follow_allocations() {
  if (memory_->stream() == stream_) return;
  CudaEvent allocated(cuda_, memory_->device());
  allocated.record(memory_->stream());
  allocated.order(memory_->device(), stream_);
}

CudaEncode GpuResiduals::encoding_of(size_t t, CodecRoute route, const void* gradient, std::byte* body) {
  c_.residuals[t]->set_route(route);
  c_.residuals[t]->count(totals_of(layout_.tensors[t], c_.codec, c_.dtype, nodes_));
  if (shard(t).count == 0) return {};
  const GpuResidual& of = gpu_residual(t);
  of.order(stream_);
  return {.gradient = gradient,
          .residual = {of.values(0), of.values(1)},
          .velocity = {of.velocity(0), of.velocity(1)},
          .state = of.state(),
          .body = body,
          .count = size_t(shard(t).count),
          .k = piece_elements(c_.codec, size_t(shard(t).count)),
          .scale = float(c_.pre),
          .momentum = float(c_.codec.momentum),
          .dtype = int(c_.dtype),
          .half = is_half(c_.codec)};
}

void GpuResiduals::used(size_t begin, size_t end, const std::shared_ptr<CudaEvent>& last) {
  for (size_t t = begin; t < end; ++t)
    if (shard(t).count > 0) gpu_residual(t).used(last);
}

void GpuResiduals::let_go(size_t end) {
  for (; gone_ < std::min(end, held_); ++gone_) c_.residuals[gone_]->let_go();
  ready_ = std::max(ready_, end);
  refused_.reset();
}

}  // namespace lightcc
