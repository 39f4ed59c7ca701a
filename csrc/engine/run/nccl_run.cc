#include "engine/run/nccl_run.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr uint64_t kWatchNs = 10'000'000;  // a GPU that is busy is looked at no more often

// Members that have joined may have no GPU.
bool all_have_gpus(const BatchItem& first) {
  return first.request->what.device == DeviceKind::cuda && first.absent == 0 && !first.placeholder;
}

}  // namespace

NcclRun::NcclRun(const Config& config, const Group& group, GroupBackends& backends, PinnedPool& pool,
                 NcclLaunches& launches, const GroupTable& groups)
    : config_(config), group_(group), backends_(backends), pool_(pool), launches_(launches), groups_(groups) {}

bool NcclRun::settles(const std::vector<BatchItem>& batch) const {
  return all_have_gpus(batch[0]) && (!is_settled_ || settles_codec(batch));
}

bool NcclRun::settles_codec(const std::vector<BatchItem>& batch) const {
  const NcclCodecRun* const codec = backends_.nccl_codec();
  return communicators_ && codec && !is_codec_settled_ &&
         is_each(batch, DeviceKind::cuda, [&](const Collective& c) { return codec->suits(c); });
}

bool NcclRun::settle(const Request& first) {
  if (is_settled_) return settle_codec();
  if (!setup_)
    setup_ = std::make_unique<NcclSetup>(config_, group_, backends_.selector(), backends_.nodes(), first.place.device);
  const bool moved = setup_->step();
  if (!setup_->done()) return moved;
  communicators_ = setup_->take();
  setup_.reset();
  is_settled_ = true;
  if (!communicators_) return true;
  const CudaFunctions& functions = cuda(config_.cuda_library);
  const int device = communicators_->all[0]->device();
  for (size_t i = 0; i < communicators_->all.size(); ++i)
    streams_.push_back(&launches_.stream(functions, device, i, config_.batch_copies));
  backends_.nccl().connect(functions, *communicators_->all[0], streams_[0]->get());
  if (communicators_->local) backends_.nccl_2d()->connect(functions, *communicators_, streams_[0]->get());
  return true;
}

bool NcclRun::settle_codec() {
  if (!codec_setup_)
    codec_setup_ = std::make_unique<NcclCodecSetup>(config_, group_, backends_.selector(), backends_.nodes(),
                                                    *communicators_);
  const bool moved = codec_setup_->step();
  if (!codec_setup_->done()) return moved;
  is_codec_settled_ = true;
  if (codec_setup_->agreed()) {
    const CudaFunctions& functions = cuda(config_.cuda_library);
    NcclStream& cross = launches_.stream(functions, codec_stream().device(), NcclLaunches::kBetweenNodes, false);
    backends_.nccl_codec()->connect(functions, pool_, *communicators_, codec_stream(), cross);
  }
  codec_setup_.reset();
  return true;
}

void NcclRun::agreed(const std::vector<BatchItem>& batch) {
  if (group_.id() == 0 && takes_turn(batch)) launches_.add_turn(0);
}

// Not of a group that was removed, and whose id another may have by now.
void NcclRun::add_turn(const LaunchTurn& turn) {
  const auto group = groups_.find(turn.group);
  if (group && group->index() >= 0 && std::ranges::equal(group->ranks(), turn.ranks)) launches_.add_turn(turn.group);
}

bool NcclRun::takes_turn(const std::vector<BatchItem>& batch) const {
  const bool may_be = group_.id() == 0 || communicators_ || (setup_ && setup_->agreed());
  return may_be && all_have_gpus(batch[0]);
}

bool NcclRun::is_full() const {
  return !streams_.empty() && !(streams_[turn_]->has_room() && streams_[0]->has_room());
}

NcclStream& NcclRun::next_stream() {
  const size_t turn = std::exchange(turn_, (turn_ + 1) % streams_.size());
  NcclStream& stream = *streams_[turn];
  if (communicators_)
    backends_.nccl().connect(cuda(config_.cuda_library), *communicators_->all[turn], stream.get());
  return stream;
}

void NcclRun::finish(Request& request) {
  request.nccl->finish(request);
  is_busy_ = communicators_ != nullptr;
}

// NCCL does not tell by itself that a collective which was queued long ago has failed.
void NcclRun::watch() {
  const uint64_t now = now_ns();
  if (now - watched_ns_ < kWatchNs) return;
  watched_ns_ = now;
  NcclCodecRun* const codec = backends_.nccl_codec();
  if (codec) codec->errors().watch();
  is_busy_ = !std::ranges::all_of(streams_, &NcclStream::idle) || (codec && codec->errors().is_busy());
  if (is_busy_) communicators_->check();
}

void NcclRun::end(uint64_t deadline_ns) {
  setup_.reset();
  codec_setup_.reset();
  if (communicators_) launches_.add_ending(communicators_->end(deadline_ns));
  communicators_.reset();
  is_busy_ = false;
}

}  // namespace lightcc
