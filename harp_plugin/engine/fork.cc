#include "harp_plugin/engine/fork.h"

#include <pthread.h>

#include <atomic>

namespace harp {

namespace {
std::atomic<uint32_t> count{0};
void in_child() { count.fetch_add(1, std::memory_order_relaxed); }
}  // namespace

uint32_t forks() {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, in_child);
  return count.load(std::memory_order_relaxed);
}

}  // namespace harp
