// How a group runs tensors of GPUs through the host's memory. Staging is made when a batch first needs it, as most
// groups have no GPU.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "base/config.h"
#include "engine/run/codec_run.h"
#include "engine/run/group_backends.h"
#include "engine/run/staging.h"
#include "net/peers.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class StagedRun {
 public:
  // pool: of all groups of this rank. All but the pool outlive this.
  StagedRun(Peers& peers, const Config& config, std::shared_ptr<PinnedPool> pool)
      : peers_(peers), cuda_library_(config.cuda_library), pool_(std::move(pool)) {}

  Staging& staging() {
    if (!staging_)
      staging_ = std::make_unique<Staging>(cuda(cuda_library_), pool_, [&peers = peers_] {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        peers.wake_own_driver();
      });
    return *staging_;
  }
  // For a batch that its GPU may compress. nullptr: not in this group.
  CodecRun* codec(const GroupBackends& backends);
  bool is_busy() const { return codec_ && codec_->errors().is_busy(); }  // a GPU decodes; watch() looks
  void watch() {
    if (codec_) codec_->errors().watch();
    trim();
  }
  void finish(Request& request, bool failed) {  // of a GPU, that was agreed on
    if (staging_) staging_->finish(request, failed);
  }

 private:
  void trim() {
    if (pool_->is_over()) pool_->trim();
  }

  Peers& peers_;
  const std::string& cuda_library_;
  const std::shared_ptr<PinnedPool> pool_;
  std::unique_ptr<Staging> staging_;
  std::unique_ptr<CodecRun> codec_;
  bool has_said_why_ = false;  // there is no codec_
};

}  // namespace lightcc
