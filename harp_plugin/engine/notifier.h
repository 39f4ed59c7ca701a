// Wakes the application where it sleeps on a descriptor until its engines have done something for it.
//
// Invariant: a thread that arms and then sees no news is rung by whatever comes afterwards.
#pragma once
#include <atomic>
#include <cstdint>

#include "base/fd.h"

namespace harp {

class Notifier {
 public:
  Notifier();
  int descriptor() const { return bell_.get(); }  // readable once there is news that the last arm() did not know of

  // A request is done, a record or a connection has come, or a connection is over. Any thread.
  void notify() {
    news_.fetch_add(1, std::memory_order_seq_cst);
    if (armed_.load(std::memory_order_seq_cst)) ring();
  }
  uint64_t news() const { return news_.load(std::memory_order_acquire); }  // how often
  bool arm();  // false: there was news since the last arm(). One thread at a time

 private:
  void ring();

  const lightcc::Fd bell_;  // an eventfd
  std::atomic<uint64_t> news_{0};
  std::atomic<bool> armed_{false};
  uint64_t seen_ = 0;       // the arming thread's
};

}  // namespace harp
