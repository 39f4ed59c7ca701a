#include "engine/run/nccl_codec_setup.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "engine/run/nccl_setup.h"

namespace lightcc {

NcclCodecSetup::NcclCodecSetup(const Config& config, const Group& group, const Selector& selector, const Hosts& nodes,
                               NcclCommunicators& communicators)
    : config_(config),
      group_(group),
      nodes_(nodes),
      communicators_(communicators),
      own_offer_(own_offer()),
      offers_(size_t(group.size())),
      gather_(start_gather(group, selector, &own_offer_, sizeof own_offer_, offers_.data())),
      connections_(config, group, selector, communicators.all[0]->device()) {}

// The kernels were loaded by whoever has submitted the first tensors, unless these are another GPU's.
NcclCodecSetup::Offer NcclCodecSetup::own_offer() const {
  Offer offer;
  const char* why = "LIGHTCC_GPU_COMPRESSION is 0";
  if (config_.gpu_compression) why = cuda(config_.cuda_library).load_codecs(communicators_.all[0]->device());
  offer.encodes = why == nullptr;
  if (why) set_text(offer.why, why);
  return offer;
}

bool NcclCodecSetup::step() {
  if (stage_ == Stage::connecting) {
    const bool moved = connections_.step();
    if (connections_.done()) stage_ = Stage::done;
    return moved;
  }
  if (!gather_->done() && !gather_->step()) return false;
  if (gather_->done()) decide();
  return true;
}

void NcclCodecSetup::decide() {
  const auto lacking = std::ranges::find(offers_, 0, &Offer::encodes);
  if (lacking != offers_.end())
    refused_ = "rank " + std::to_string(group_.rank(int(lacking - offers_.begin()))) + ": " + text_in(lacking->why);
  if (group_.index() == 0)
    log(Level::info, agreed() ? "compressed all-reduces of tensors of GPUs: by NCCL, which exchanges what GPUs make"
                              : "compressed all-reduces of tensors of GPUs: through the host, since not all GPUs of "
                                "the group compress: " + refused_);
  stage_ = Stage::done;
  if (!agreed() || communicators_.local) return;
  connections_.plan_2d(nodes_, communicators_);
  stage_ = Stage::connecting;
}

}  // namespace lightcc
