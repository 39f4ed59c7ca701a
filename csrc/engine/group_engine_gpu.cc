// What a group engine does for tensors of GPUs: they run on their GPU if all members can use NCCL, else through the
// host.
#include <algorithm>

#include "base/clock.h"
#include "collective/node_links.h"
#include "engine/group_engine.h"

namespace lightcc {
namespace {

constexpr uint64_t kWatchNs = 10'000'000;  // a GPU that is busy is looked at no more often

// Members that have joined may have no GPU.
bool all_have_gpus(const BatchItem& first) {
  return first.request->what.device == DeviceKind::cuda && first.absent == 0 && !first.placeholder;
}

}  // namespace

// The first batch of tensors of GPUs that all members have lets them settle whether they use NCCL.
bool GroupEngine::settles_nccl(const std::vector<BatchItem>& batch) const {
  return !nccl_settled_ && all_have_gpus(batch[0]);
}

// Whether NCCL may run the batch, or communicators are made for it, as all members know alike. The world's takes one in
// any case: when it is agreed on, that may not be settled yet.
bool GroupEngine::takes_turn(const std::vector<BatchItem>& batch) const {
  const bool may_be = group_->id() == 0 || communicators_ || (nccl_setup_ && nccl_setup_->agreed());
  return may_be && all_have_gpus(batch[0]);
}

bool GroupEngine::settle_nccl(const Request& first) {
  if (!nccl_setup_)
    nccl_setup_ = std::make_unique<NcclSetup>(config_, *group_, selector_, nodes_of(*group_, config_.intra_size),
                                              first.place.device);
  const bool moved = nccl_setup_->step();
  if (!nccl_setup_->done()) return moved;
  communicators_ = nccl_setup_->take();
  nccl_setup_.reset();
  nccl_settled_ = true;
  if (!communicators_) return true;
  const CudaFunctions& functions = cuda(config_.cuda_library);
  const int device = communicators_->all[0]->device();
  for (size_t i = 0; i < communicators_->all.size(); ++i)
    nccl_streams_.push_back(&launches_.stream(functions, device, i, config_.batch_copies));
  nccl_->connect(functions, *communicators_->all[0], nccl_streams_[0]->get());
  if (communicators_->local) nccl_2d_->connect(functions, *communicators_, nccl_streams_[0]->get());
  return true;
}

// All members take the streams by the same turns, as each runs the same batches by NCCL.
GpuWays GroupEngine::next_stream() {
  const size_t turn = nccl_stream_;
  nccl_stream_ = (turn + 1) % nccl_streams_.size();
  NcclStream* const stream = nccl_streams_[turn];
  if (communicators_) nccl_->connect(cuda(config_.cuda_library), *communicators_->all[turn], stream->get());
  return {.nccl = stream};
}

bool GroupEngine::is_gpu_full() const {
  return !nccl_streams_.empty() && !nccl_streams_[nccl_stream_]->has_room();
}

GpuWays GroupEngine::ways_of(const std::vector<BatchItem>& batch) {
  if (batch[0].request->place.kind == DeviceKind::cpu) return {};
  if (runs_on_gpu(batch, selector_)) return next_stream();
  if (!staging_)
    staging_ = std::make_unique<Staging>(cuda(config_.cuda_library), pinned_, [this] {
      std::atomic_thread_fence(std::memory_order_seq_cst);
      peers_.wake_own_driver();
    });
  return {.staging = staging_.get()};
}

// A request that was agreed on: the program's stream goes on behind what was queued for it, also if it has failed.
void GroupEngine::hand_back(const RequestPtr& request, Code code, std::string text) {
  try {
    if (request->nccl) {
      request->nccl->finish(*request);
      gpu_is_busy_ = communicators_ != nullptr;
    } else if (staging_ && request->place.kind == DeviceKind::cuda) {
      staging_->finish(*request, code != Code::ok);
    }
  } catch (const Error& error) {
    if (code == Code::ok) return fail(request, error.code(), error.what());
  }
  finish(request, code, std::move(text));
}

// NCCL does not tell by itself that a collective which was queued long ago has failed.
void GroupEngine::watch_gpu() {
  const uint64_t now = now_ns();
  if (now - watched_ns_ < kWatchNs) return;
  watched_ns_ = now;
  gpu_is_busy_ = !std::ranges::all_of(nccl_streams_, &NcclStream::idle);
  if (gpu_is_busy_) communicators_->check();
}

bool GroupEngine::polls() const {
  progress_lock_.assert_held();
  return nccl_setup_ || (!batches_.empty() && is_gpu_full()) || (!running_.empty() && running_[0]->by_nccl());
}

void GroupEngine::end_nccl(uint64_t deadline_ns) {
  progress_lock_.assert_held();
  nccl_setup_.reset();
  if (communicators_) launches_.add_ending(communicators_->end(deadline_ns));
  communicators_.reset();
  gpu_is_busy_ = false;
}

}  // namespace lightcc
