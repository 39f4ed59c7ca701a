// Time and waiting, the two things that code which decides never does itself.
#pragma once
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace lightcc {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1'000'000'000 + uint64_t(t.tv_nsec);
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How a thread passes the time before it sleeps: it spins, then it offers its core to others. Spinning pays only while
// the one it waits for runs on another core; so what has not come by spinning halves the next spin, and what
// has doubles it. One habit serves all waits of an engine.
class SpinHabit {
 public:
  explicit SpinHabit(uint64_t most_ns) : most_ns_(most_ns), now_ns_(most_ns) {}
  uint64_t spin_ns() const { return now_ns_.load(std::memory_order_relaxed); }
  bool crowded() const { return most_ns_ == 0; }  // there are fewer cores than ranks
  void paid(bool did) {
    uint64_t now = spin_ns();
    now_ns_.store(did ? std::min(most_ns_, now * 2) : std::max(std::min(most_ns_, kLeastNs), now / 2),
                  std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kLeastNs = 250;
  const uint64_t most_ns_;
  std::atomic<uint64_t> now_ns_;
};

class Patience {
 public:
  explicit Patience(SpinHabit& habit) : habit_(habit), spin_ns_(habit.spin_ns()) {}
  void reset() {  // something came
    if (since_ != 0) habit_.paid(!yielded_);
    turns_ = 0;
    since_ = 0;
    yielded_ = false;
    idle_yields_ = 0;
    spin_ns_ = habit_.spin_ns();
  }
  bool wait_a_little() {  // false: patience is used up, sleep
    if (!yielded_ && !habit_.crowded() && ++turns_ % kTurnsPerLook != 0) return cpu_relax(), true;
    uint64_t now = lightcc::now_ns();
    if (since_ == 0) since_ = now;
    if (now - since_ < spin_ns_) return true;
    yielded_ = true;
    if (now - since_ >= spin_ns_ + kYieldNs) return false;
    sched_yield();
    // Where cores are shared and yet nobody took ours, the kernel does not let those run whom we wait for (they are in
    // another scheduling group): only sleep does.
    idle_yields_ = lightcc::now_ns() - now < kNobodyNs ? idle_yields_ + 1 : 0;
    return idle_yields_ < kIdleYields || !habit_.crowded();
  }

 private:
  static constexpr unsigned kTurnsPerLook = 8;  // a look at the clock costs as much as a few turns
  static constexpr uint64_t kYieldNs = 100'000, kNobodyNs = 1'000;
  static constexpr int kIdleYields = 64;
  SpinHabit& habit_;
  uint64_t spin_ns_;
  unsigned turns_ = 0;
  uint64_t since_ = 0;
  bool yielded_ = false;
  int idle_yields_ = 0;
};

}  // namespace lightcc
