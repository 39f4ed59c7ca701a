#include "engine/run/batch_queue.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/clock.h"
#include "collective/compressed.h"
#include "engine/request/gpu_streams.h"

namespace lightcc {
namespace {

// Whether such a batch may run beside another. Those of a joined rank share one piece of memory; Adasum needs as much
// again while it waits; a compressed one uses the links of 2D; the other kinds are rare, and some of them end what
// others need.
bool may_overlap(const std::vector<BatchItem>& batch, int nodes) {
  const Announcement& what = batch[0].request->what;
  const auto is_compressed = [&](const TensorSpec& tensor) { return compresses(what.codec, tensor.dtype, nodes); };
  return what.kind == Kind::allreduce && what.op != ReduceOp::adasum && !batch[0].placeholder &&
         std::none_of(what.tensors.begin(), what.tensors.end(), is_compressed);
}

}  // namespace

BatchQueue::BatchQueue(const RunResources& shared, std::shared_ptr<const Group> group, GroupBackends& backends)
    : shared_(shared),
      group_(std::move(group)),
      backends_(backends),
      buffers_{FusionBuffer(shared.peers.arena()), FusionBuffer(shared.peers.arena())},
      staged_(shared.peers, shared.config, shared.pinned),
      nccl_(shared.config, *group_, backends, *shared.pinned, shared.launches, shared.groups),
      joined_rank_(shared.peers.arena()) {}

void BatchQueue::add(std::vector<BatchItem> items) {
  nccl_.agreed(items);
  shared_.tracing.agreed(items, size() > 0);
  batches_.push_back(std::move(items));
}

void BatchQueue::watch() {
  if (nccl_.is_busy()) nccl_.watch();
  staged_.watch();
}

bool BatchQueue::step() {
  bool moved = begin(), may_start = true;
  for (auto& execution : running_) {
    moved |= execution->step(may_start);
    may_start = may_start && execution->all_started();
  }
  return moved;
}

bool BatchQueue::begin() {
  if (batches_.empty() || running_.size() == most_running()) return false;
  const std::vector<BatchItem>& batch = batches_[0];
  const int nodes = int(backends_.nodes().size());
  const bool has_turn = nccl_.takes_turn(batch), settles = nccl_.settles(batch);
  const bool is_alone = settles || runs_on_gpu(batch, backends_.selector());
  if (is_alone && nccl_.is_full()) return false;
  const bool may_begin = running_.empty() || (!is_alone && !running_.back()->by_nccl() &&
                                              may_overlap(running_.back()->items(), nodes) &&
                                              may_overlap(batch, nodes));
  if (!may_begin) return false;
  if (has_turn && !nccl_.is_next()) {
    if (!nccl_.has_turn()) shared_.effects.push(effect::AwaitTurn{group_});
    return false;
  }
  const RequestPtr& front = batch[0].request;
  if (settles) return nccl_.settle(*front);
  if (changes_groups(front->what.kind) && front->changed_group < 0) {
    shared_.effects.push(effect::ChangeGroups{front});
    return true;
  }
  if (batch[0].placeholder && !joined_rank_.prepare(batch)) return true;
  static_assert(hold::kBatchesBetweenHosts == 2);
  buffer_ = running_.empty() ? 0 : 1 - buffer_;
  // It may throw: then the batch is still here, to fail.
  running_.push_back(std::make_unique<BatchExecution>(batch, *group_, buffers_[buffer_], shared_.outputs,
                                                      shared_.counters, shared_.tracing, backends_.selector(),
                                                      ways_of(batch)));
  batches_.pop_front();
  if (has_turn && !running_.back()->by_nccl()) nccl_.end_turn();
  return true;
}

GpuWays BatchQueue::ways_of(const std::vector<BatchItem>& batch) {
  if (batch[0].request->place.kind == DeviceKind::cpu) return {};
  if (runs_on_gpu(batch, backends_.selector())) {
    const bool is_compressed = batch[0].request->what.codec.kind != CodecKind::none;
    if (is_compressed) return {.nccl = &nccl_.codec_stream(), .codec = backends_.nccl_codec()};
    return {.nccl = &nccl_.next_stream()};
  }
  return {.staging = &staged_.staging(), .codec = batch[0].request->encodes ? staged_.codec(backends_) : nullptr};
}

std::optional<BatchQueue::DoneBatch> BatchQueue::take_done() {
  if (running_.empty() || !running_[0]->done()) return std::nullopt;
  DoneBatch done{std::move(running_[0]), 0};
  running_.pop_front();
  const uint64_t began_ns = std::max(done.batch->began_ns(), ended_ns_);
  ended_ns_ = now_ns();
  done.seconds = double(ended_ns_ - began_ns) * 1e-9;
  for (const BatchItem& item : done.batch->items()) {
    if (item.request->what.kind == Kind::join) joined_rank_.clear();
    if (item.placeholder) continue;
    const std::string& failure = done.batch->failure();
    if (failure.empty())
      hand_back(item.request, Code::ok);
    else
      hand_back(item.request, Code::internal, item.request->title() + ": " + failure);
  }
  if (done.batch->by_nccl()) nccl_.end_turn();
  return done;
}

// A request that was agreed on. The stream of one of a GPU goes on behind its outputs when the program hears that it is
// done (api/requests.cc): what the stream is given until then runs beside them. Here it does where nobody asks: before
// a callback, and behind what may still be queued for a request that has failed, also if it is unordered.
void BatchQueue::hand_back(const RequestPtr& request, Code code, std::string text) {
  const bool failed = code != Code::ok;
  try {
    if (request->nccl)
      nccl_.finish(*request);
    else if (request->place.kind == DeviceKind::cuda)
      staged_.finish(*request, failed);
    if (failed || (request->callbacks.done && !request->unordered)) order_own_stream(*request);
  } catch (const Error& error) {
    if (code == Code::ok) code = error.code(), text = request->title() + ": " + error.what();
  } catch (const std::exception& error) {  // std::bad_alloc: the others of its batch are to be handed back
    if (code == Code::ok) code = Code::internal, text = request->title() + ": " + error.what();
  }
  shared_.effects.push(effect::Finish{request, code, std::move(text)});
}

void BatchQueue::fail_all(Code code, const std::string& text) {
  std::vector<BatchItem> agreed;
  const auto take = [&](const auto& items) { agreed.insert(agreed.end(), items.begin(), items.end()); };
  for (const auto& execution : running_) take(execution->items());
  for (const auto& batch : batches_) take(batch);
  running_.clear();
  batches_.clear();
  for (const BatchItem& item : agreed)
    if (!item.placeholder) hand_back(item.request, code, item.request->title() + ": " + text);
}

bool BatchQueue::polls() const {
  return nccl_.is_settling() || (!batches_.empty() && nccl_.is_full()) ||
         (!running_.empty() && running_[0]->by_nccl());
}

}  // namespace lightcc
