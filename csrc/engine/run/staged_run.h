// How a group runs tensors of GPUs through the host's memory. Staging is made when a batch first needs it, as most
// groups have no GPU.
#pragma once
#include <memory>
#include <string>
#include <utility>

#include "engine/run/staging.h"
#include "net/peers.h"

namespace lightcc {

// Only whoever holds the progress lock calls it.
class StagedRun {
 public:
  // pool: of all groups of this rank. cuda_library: as Config has it. All but the pool outlive this.
  StagedRun(Peers& peers, const std::string& cuda_library, std::shared_ptr<PinnedPool> pool)
      : peers_(peers), cuda_library_(cuda_library), pool_(std::move(pool)) {}

  Staging& staging() {
    if (!staging_)
      staging_ = std::make_unique<Staging>(cuda(cuda_library_), pool_, [&peers = peers_] {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        peers.wake_own_driver();
      });
    return *staging_;
  }
  void finish(Request& request, bool failed) {  // of a GPU, that was agreed on
    if (staging_) staging_->finish(request, failed);
  }
  void trim() {
    if (pool_->is_over()) pool_->trim();
  }

 private:
  Peers& peers_;
  const std::string& cuda_library_;
  const std::shared_ptr<PinnedPool> pool_;
  std::unique_ptr<Staging> staging_;
};

}  // namespace lightcc
