#include "engine/run/batch_execution.h"

#include <algorithm>

#include "base/clock.h"
#include "device/device.h"

namespace lightcc {
namespace {

constexpr size_t kCopyBytes = 256 << 10;  // at most a step

}  // namespace

std::byte* FusionBuffer::at_least(size_t bytes) {
  if (bytes > bytes_) {
    arena_->release(data_);
    data_ = nullptr;
    bytes_ = 0;
    data_ = arena_->allocate(bytes + bytes / 2);
    bytes_ = bytes + bytes / 2;
    arena_->populate(data_, bytes);
  }
  return data_;
}

bool is_each(const std::vector<BatchItem>& items, DeviceKind device,
             const std::function<bool(const Collective&)>& predicate) {
  return std::ranges::all_of(items, [&](const BatchItem& item) {
    const Announcement& what = item.request->what;
    Collective c{};
    c.kind = what.kind;
    c.device = device;
    c.codec = what.codec;
    c.pre = what.pre;
    set_average(c, what.op, what.post);
    return std::ranges::all_of(what.tensors, [&](const TensorSpec& tensor) {
      c.dtype = tensor.dtype;
      return predicate(c);
    });
  });
}

bool runs_on_gpu(const std::vector<BatchItem>& items, const Selector& selector) {
  if (items[0].request->what.device == DeviceKind::cpu) return false;
  if (items[0].absent > 0 || items[0].placeholder) return false;  // a rank that has joined may have no GPU
  return is_each(items, items[0].request->what.device, [&](const Collective& c) { return selector.has(c); });
}

BatchExecution::BatchExecution(std::vector<BatchItem> items, const Group& group, FusionBuffer& buffer,
                               const std::shared_ptr<OutputPool>& outputs, Counters& counters, Tracing& tracing,
                               const Selector& selector, GpuWays gpu)
    : items_(std::move(items)),
      group_(group),
      buffer_(buffer),
      outputs_(outputs),
      counters_(counters),
      tracing_(tracing),
      selector_(selector),
      staging_(gpu.staging),
      nccl_(gpu.nccl),
      codec_(gpu.codec) {
  Kind kind = items_[0].request->what.kind;
  for (BatchItem& item : items_) {
    item.request->results.resize(item.request->what.tensors.size());
    if (item.request->what.device == DeviceKind::cuda)
      owners_.insert(owners_.end(), item.request->inputs.size(), item.request.get());
    item.request->nccl = nccl_;
    if (nccl_) nccl_->follow(*item.request);
  }
  if (kind == Kind::allreduce) {
    plan_allreduce();
  } else if (kind == Kind::allgather || kind == Kind::broadcast || kind == Kind::alltoall ||
             kind == Kind::reducescatter) {
    for (BatchItem& item : items_)
      for (size_t t = 0; t < item.request->what.tensors.size(); ++t) plan_tensor(item, t);
  }
  counters_.add(Counters::batches);
  size_t tensors = 0;
  for (BatchItem& item : items_) tensors += item.request->what.tensors.size();
  if (tensors > 1) counters_.add(Counters::fused_batches);
  if (items_.size() > 1) counters_.add(Counters::fused_requests, items_.size());
}

// Queues the copies of a batch on a GPU, without waiting for them.
void BatchExecution::queue_all(const std::vector<Piece>& pieces) {
  std::vector<CudaCopy> here;
  for (const Piece& piece : pieces) {
    const CudaCopy copy{piece.out, piece.in, piece.bytes};
    if (piece.between_gpus)
      nccl_->copy(copy);
    else
      here.push_back(copy);
  }
  nccl_->copy_all(here);
}

bool BatchExecution::copy_some(const std::vector<Piece>& pieces) {  // false: all copied
  if (nccl_) return queue_all(pieces), false;
  size_t budget = kCopyBytes;
  while (piece_ < pieces.size() && budget) {
    const Piece& piece = pieces[piece_];
    size_t n = std::min(budget, piece.bytes - offset_);
    copy(static_cast<std::byte*>(piece.out) + offset_, static_cast<const std::byte*>(piece.in) + offset_, n);
    offset_ += n;
    budget -= n;
    if (offset_ == piece.bytes) {
      ++piece_;
      offset_ = 0;
    }
  }
  return piece_ < pieces.size();
}

// Queues copies to the host as far ahead as there are slots.
bool BatchExecution::fetch_ahead() {
  bool moved = false;
  for (; fetched_ < collectives_.size(); ++fetched_, moved = true) {
    FusedCollective& fused = collectives_[fetched_];
    if (fused.staged_bytes == 0) continue;
    const Request& request = *items_[0].request;
    const int device = request.place.device;
    fused.slot = fused.result ? staging_->take_for_results(device, fused.staged_bytes)
                              : staging_->take(device, fused.staged_bytes);
    if (!fused.slot) break;
    fused.collective.input = fused.slot->data() + fused.input_offset;
    fused.collective.output = fused.slot->data() + fused.output_offset;
    staging_->fetch(*fused.slot, fused.fetch);
  }
  return moved;
}

bool BatchExecution::start_next(bool may_start) {
  FusedCollective& fused = collectives_[next_];
  if (fused.staged_bytes > 0 && (!fused.slot || !fused.slot->idle())) {
    tracing_.activity(items_, "MEMCPY_DEVICE_TO_HOST");
    return false;
  }
  if (piece_ < fused.before.size()) {
    tracing_.activity(items_, fused.collective.kind == Kind::allreduce ? "MEMCPY_IN_FUSION_BUFFER" : "MEMCPY");
    if (copy_some(fused.before)) return true;
    if (!may_start) return tracing_.activity(items_, "QUEUE"), true;
  }
  if (!may_start) return false;
  piece_ = offset_ = 0;
  if (began_ns_ == 0) began_ns_ = now_ns();
  const Row& row = selector_.choose(fused.collective, items_[0].second);
  tracing_.activity(items_, row);
  fused.collective.timed = tracing_.running();
  work_ = fused.encoded.empty() ? row.backend->start(fused.collective, row.algorithm)
                                : codec_->start(fused.collective, std::move(fused.encoded));
  counters_.add(Counters::collectives);
  const int64_t bytes = fused.collective.count * int64_t(size_of(fused.collective.dtype));
  counters_.add(Counters::payload_bytes, uint64_t(bytes));
  bytes_ += bytes;
  return true;
}

// Whether or not it was compressed, it was an exchange of its tensors.
void BatchExecution::count_compression(const Collective& c) {
  for (size_t t = 0; t < c.residuals.size(); ++t) {
    Residual& residual = *c.residuals[t];
    residual.count_step();
    const CompressionTotals last = residual.take_last();
    if (last.gradient_bytes == 0 && residual.try_hold()) {  // else a caller looks at it; the next exchange comes
      residual.note_dense(c.tensors[t].count);
      residual.let_go();
    }
    counters_.add(Counters::compressed_bytes, last.gradient_bytes);
    if (last.sent_bytes < last.dense_sent_bytes)
      counters_.add(Counters::saved_bytes, last.dense_sent_bytes - last.sent_bytes);
  }
}

std::string BatchExecution::text_of(const NoMemory& lacks, const Collective& c) const {
  const auto has_it = [&](const BatchItem& item) {
    return std::ranges::find(item.request->residuals, c.residuals[lacks.tensor]) != item.request->residuals.end();
  };
  const auto item = std::ranges::find_if(items_, has_it);
  return "rank " + std::to_string(group_.rank(lacks.member)) + " has no memory on its GPU to compress " +
         (item == items_.end() ? "a tensor" : item->request->title()) + ", of which " + std::to_string(lacks.bytes) +
         " bytes stay there from step to step: use a smaller model or batch there, or LIGHTCC_GPU_COMPRESSION=0";
}

// Takes the results of a staged collective that is done out of its slot.
void BatchExecution::empty(FusedCollective& fused) {
  staging_->deliver(*fused.slot, fused.deliver, fetched_ < collectives_.size());
  if (fused.result) {
    fused.result->data = fused.slot->data() + fused.output_offset;
    fused.result->gpu = fused.slot;
  }
  fused.slot = nullptr;
}

bool BatchExecution::step(bool may_start) {
  if (done()) return false;
  bool moved = may_start && fetch_ahead();
  if (!work_) moved |= start_next(may_start);
  if (!work_ || (!work_->done() && !work_->step())) return moved;
  if (!work_->done()) return true;
  if (!collectives_[next_].after.empty()) {
    tracing_.activity(items_, "MEMCPY_OUT_FUSION_BUFFER");
    if (copy_some(collectives_[next_].after)) return true;
  }
  tracing_.activity(items_, "");
  tracing_.phases(items_, work_->phases());
  count_compression(collectives_[next_].collective);
  if (const auto lacks = work_->no_memory(); lacks && failure_.empty())
    failure_ = text_of(*lacks, collectives_[next_].collective);
  work_.reset();
  if (collectives_[next_].slot) empty(collectives_[next_]);
  piece_ = offset_ = 0;
  ++next_;
  return true;
}

}  // namespace lightcc
