// How a batch becomes collectives: which, on what memory, and what is copied before and after each.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/run/batch_execution.h"

namespace lightcc {
namespace {

// The factor that makes a sum an average. For integers a hair more than 1/n, so that truncating 49 * (1/49) gives
// 1 and not 0; the error stays below 1/n for sums under 2^51.
double average_factor(DType dtype, int n) {
  double factor = 1.0 / n;
  return !is_floating(dtype) && n > 1 ? std::nextafter(factor, 1.0) : factor;
}

int64_t row_count(const Shape& shape) {  // elements in one row of dimension 0
  return count_of(Shape(shape.begin() + 1, shape.end()));
}

// A rank without data puts ones into a product, which no factor may touch: it moves behind the product.
void set_reduction(Collective& c, const BatchItem& item) {
  const Announcement& what = item.request->what;
  c.pre = what.pre;
  set_average(c, what.op, what.post);
  if (item.absent == 0 || what.op != ReduceOp::product || what.pre == 1) return;
  c.pre = 1;
  c.post = what.post * std::pow(what.pre, c.size - item.absent);
}

}  // namespace

void set_average(Collective& c, ReduceOp op, double post) {
  c.op = op == ReduceOp::average ? ReduceOp::sum : op;
  c.post = op == ReduceOp::average ? post * average_factor(c.dtype, c.size) : post;
}

void BatchExecution::plan_allreduce() {
  std::vector<BatchTensor> tensors;
  Residuals residuals;  // by tensor, if they are to be compressed
  for (const BatchItem& item : items_) {
    residuals.insert(residuals.end(), item.request->residuals.begin(), item.request->residuals.end());
    for (size_t t = 0; t < item.request->what.tensors.size(); ++t) {
      const TensorSpec& spec = item.request->what.tensors[t];
      const size_t bytes = size_t(count_of(spec.shape)) * size_of(spec.dtype);
      tensors.push_back({spec.dtype, bytes, item.request->inputs[t], item.request->outputs[t]});
    }
  }
  // On a GPU what lies between tensors is written too.
  const bool all_padded = nccl_ && std::ranges::all_of(items_, [&](const BatchItem& item) {
    return item.request->padded && item.request->place.device == nccl_->device();
  });
  const auto may_be_used = [&](const void* begin, size_t bytes) {
    if (nccl_) return all_padded && reinterpret_cast<uintptr_t>(begin) % kLine == 0;
    return buffer_.arena().offset_of(begin, bytes) >= 0;
  };
  const BatchLayout layout = lay_out(tensors, may_be_used);
  if (is_staged()) {
    for (const CollectiveLayout& collective : layout.collectives) {
      FusedCollective fused = fused_allreduce(collective, tensors, residuals, nullptr);
      if (!plan_encoded(collective, tensors, fused)) plan_slices(collective, tensors, fused);
    }
    return;
  }
  const bool needs_buffer = layout.buffer_bytes > 0 && !codec_;
  std::byte* buffer = needs_buffer ? fusion_buffer(layout.buffer_bytes) : nullptr;
  for (const CollectiveLayout& collective : layout.collectives) {
    FusedCollective fused = fused_allreduce(collective, tensors, residuals, buffer);
    if (plan_encoded(collective, tensors, fused)) continue;
    if (nccl_ && fused.before.empty()) bring_here(*owners_[collective.places[0].tensor], fused);
    collectives_.push_back(std::move(fused));
  }
}

// What the GPU itself compresses is taken where it is. false: it does not.
bool BatchExecution::plan_encoded(const CollectiveLayout& layout, const std::vector<BatchTensor>& tensors,
                                  const FusedCollective& whole) {
  if (!codec_ || items_[0].placeholder || whole.collective.codec.kind == CodecKind::none) return false;
  FusedCollective encoded{whole};
  for (auto [tensor, offset] : layout.places)
    encoded.encoded.push_back({owners_[tensor], tensors[tensor].input, tensors[tensor].output});
  const Row& row = selector_.choose(whole.collective, items_[0].second);
  if (!codec_->takes(row, whole.collective.codec, encoded.encoded)) return false;
  encoded.before.clear();
  encoded.after.clear();
  collectives_.push_back(std::move(encoded));
  return true;
}

BatchExecution::FusedCollective BatchExecution::fused_allreduce(const CollectiveLayout& layout,
                                                                const std::vector<BatchTensor>& tensors,
                                                                const Residuals& residuals,
                                                                std::byte* buffer) const {
  const Announcement& what = items_[0].request->what;  // op and factors are the same in the whole batch
  FusedCollective fused{};
  Collective& c = fused.collective;
  c.kind = Kind::allreduce;
  c.index = group_.index();
  c.size = group_.size();
  c.device = device();
  c.dtype = layout.dtype;
  c.count = int64_t(layout.bytes / size_of(c.dtype));
  set_reduction(c, items_[0]);
  c.codec = what.codec;
  if (what.op == ReduceOp::adasum || c.codec.kind != CodecKind::none)
    for (auto [tensor, offset] : layout.places)
      c.tensors.push_back({int64_t(offset / size_of(c.dtype)), int64_t(tensors[tensor].bytes / size_of(c.dtype))});
  if (c.codec.kind != CodecKind::none)
    for (auto [tensor, offset] : layout.places) c.residuals.push_back(residuals[tensor]);
  const BatchTensor& first = tensors[layout.places[0].tensor];
  c.input = first.input;
  c.output = first.output;
  if (!layout.buffer_offset || !buffer) return fused;
  std::byte* begin = buffer + *layout.buffer_offset;
  c.input = c.output = begin;
  for (auto [tensor, offset] : layout.places) {
    const size_t bytes = tensors[tensor].bytes;
    const bool between_gpus = nccl_ && owners_[tensor]->place.device != nccl_->device();
    fused.before.push_back({tensors[tensor].input, begin + offset, bytes, between_gpus});
    fused.after.push_back({begin + offset, tensors[tensor].output, bytes, between_gpus});
  }
  return fused;
}

void* BatchExecution::result(Request& request, size_t tensor, Shape shape) {
  Output& output = request.results[tensor];
  output.shape = std::move(shape);
  size_t bytes = size_t(count_of(output.shape)) * size_of(request.what.tensors[tensor].dtype);
  if (nccl_) output.gpu = nccl_->output(std::max<size_t>(bytes, 1), &output.data);
  if (request.place.kind == DeviceKind::cuda) return output.data;  // else it comes to lie in a slot
  if (request.callbacks.allocate) {
    output.data = request.callbacks.allocate(request.callbacks.context, int(tensor), output.shape.data(),
                                             int(output.shape.size()));
  } else {
    if (outputs_->serves(bytes))
      output.own = {outputs_->allocate(bytes), OutputDeleter{outputs_}};
    else
      output.own = {std::aligned_alloc(kLine, round_up(std::max<size_t>(bytes, 1))), OutputDeleter{}};
    output.data = output.own.get();
  }
  if (!output.data && bytes)
    throw Error(Code::internal, "no memory for " + std::to_string(bytes) + " bytes of output of " + request.title());
  return output.data;
}

void BatchExecution::plan_tensor(BatchItem& item, size_t t) {
  Request& request = *item.request;
  const TensorSpec& spec = request.what.tensors[t];
  const int n = group_.size(), me = group_.index();
  FusedCollective fused{};
  Collective& c = fused.collective;
  c.kind = request.what.kind;
  c.index = me;
  c.size = n;
  c.device = device();
  c.dtype = spec.dtype;
  c.input = request.inputs[t];
  Shape shape = spec.shape;
  int64_t elements = 0;
  switch (c.kind) {
    case Kind::broadcast: {
      c.root = group_.index_of(request.what.root);
      c.count = elements = count_of(shape);
      c.output = request.outputs[t];
      if (is_staged()) {
        if (elements == 0) return;
        std::vector<BatchTensor> tensors(item.request->inputs.size());
        for (size_t i = 0; i < tensors.size(); ++i)
          tensors[i] = {request.what.tensors[i].dtype, 0, request.inputs[i], request.outputs[i]};
        tensors[t].bytes = size_t(elements) * size_of(c.dtype);
        return plan_slices({c.dtype, {{t, 0}}, tensors[t].bytes, std::nullopt}, tensors, fused);
      }
      if (c.root == me && c.output != c.input && elements)
        fused.before = {{c.input, c.output, size_t(elements) * size_of(c.dtype)}};
      break;
    }
    case Kind::allgather: {
      shape[0] = 0;
      for (int64_t rows : item.rows[t]) c.counts.push_back(rows * row_count(spec.shape)), shape[0] += rows;
      elements = count_of(shape);
      c.output = result(request, t, shape);
      break;
    }
    case Kind::alltoall: {
      auto& rows = item.rows[t];
      shape[0] = 0;
      auto& from = request.results[t].rows_from;
      for (int i = 0; i < n; ++i) {
        c.send.push_back(rows[me * n + i] * row_count(spec.shape));
        c.counts.push_back(rows[i * n + me] * row_count(spec.shape));
        from.push_back(int32_t(rows[i * n + me]));
        shape[0] += rows[i * n + me];
      }
      for (int64_t r : rows) elements += r * row_count(spec.shape);
      c.output = result(request, t, shape);
      break;
    }
    default: {  // reducescatter: the first ranks get one row more
      int64_t least = spec.shape[0] / n, more = spec.shape[0] % n;
      for (int i = 0; i < n; ++i) c.counts.push_back((least + (i < more)) * row_count(spec.shape));
      shape[0] = least + (me < more);
      elements = count_of(spec.shape);
      set_reduction(c, item);
      c.output = result(request, t, shape);
    }
  }
  if (!elements) return;  // nothing to move: all ranks know
  if (is_staged()) return plan_staged(item, t, std::move(fused));
  if (nccl_) bring_here(request, fused);
  collectives_.push_back(std::move(fused));
}

// Tensors of another GPU than the one on which this batch runs are copied there, and back.
void BatchExecution::bring_here(const Request& request, FusedCollective& fused) {
  if (request.place.device == nccl_->device()) return;
  Collective& c = fused.collective;
  const bool is_vector = c.kind == Kind::allreduce || c.kind == Kind::broadcast;
  const std::vector<int64_t>& counts = c.kind == Kind::alltoall ? c.send : c.counts;
  const int64_t input_count = is_vector                       ? c.count
                              : c.kind == Kind::allgather ? c.counts[size_t(c.index)]
                                                          : std::accumulate(counts.begin(), counts.end(), int64_t(0));
  const size_t bytes = size_t(input_count) * size_of(c.dtype);
  if (bytes == 0) return;
  void* here = nullptr;
  fused.here = nccl_->output(bytes, &here);
  if (c.kind != Kind::broadcast || c.root == c.index) fused.before = {{c.input, here, bytes, true}};
  c.input = here;
  if (!is_vector) return;
  fused.after = {{here, c.output, bytes, true}};
  c.output = here;
}

}  // namespace lightcc
