// What the thread that watches the other ranks has learnt of them, until the engine's next step takes it. Any thread
// may call everything; nothing is acted upon here.
#pragma once
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/lifecycle/epoch_state.h"

namespace lightcc {

class HealthEvents {
 public:
  struct OfHosts {
    std::optional<EpochCause> ended_elsewhere;  // the epoch, as the first heartbeat that said so told it
    std::vector<int> lost, unheard;             // hosts
  };

  explicit HealthEvents(int ranks) : process_ended_(size_t(ranks)) {}

  void process_ended(int rank) { process_ended_[size_t(rank)] = true; }
  void host_lost(int host) {
    std::lock_guard lock(mutex_);
    of_hosts_.lost.push_back(host);
  }
  void host_unheard(int host) {
    std::lock_guard lock(mutex_);
    of_hosts_.unheard.push_back(host);
  }
  void ended_elsewhere(EpochCause cause) {
    std::lock_guard lock(mutex_);
    if (!of_hosts_.ended_elsewhere) of_hosts_.ended_elsewhere = std::move(cause);
  }

  bool has_process_ended(int rank) const { return process_ended_[size_t(rank)]; }
  OfHosts take() {  // each once
    std::lock_guard lock(mutex_);
    return std::exchange(of_hosts_, {});
  }

 private:
  std::vector<std::atomic<bool>> process_ended_;  // by rank
  std::mutex mutex_;
  OfHosts of_hosts_;
};

}  // namespace lightcc
