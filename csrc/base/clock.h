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
// the one it waits for runs on another core, so what has not come by spinning halves the next spin, and what has
// doubles it. Offering pays while answers come soon, so a long wait halves the time of the next offers, and a short one
// doubles it. One habit serves all waits of an engine.
class WaitHabit {
 public:
  explicit WaitHabit(uint64_t most_spin_ns) : spin_{kLeastSpinNs, most_spin_ns}, yield_{kLeastYieldNs, kMostYieldNs} {}
  uint64_t spin_ns() const { return spin_.now_ns.load(std::memory_order_relaxed); }
  uint64_t yield_ns() const { return yield_.now_ns.load(std::memory_order_relaxed); }
  bool oversubscribed() const { return spin_.most_ns == 0; }  // there are fewer cores than ranks
  void spinning_paid(bool did) { spin_.paid(did); }
  void waited(uint64_t ns) { yield_.paid(ns < kLongNs); }  // and did not spin all the time

 private:
  static constexpr uint64_t kLeastSpinNs = 250, kLeastYieldNs = 5'000, kMostYieldNs = 100'000;
  static constexpr uint64_t kLongNs = 500'000;  // for a network that makes others wait so long, sleep is soon enough
  struct Time {
    Time(uint64_t least, uint64_t most) : least_ns(std::min(least, most)), most_ns(most), now_ns(most) {}
    void paid(bool did) {
      const uint64_t now = now_ns.load(std::memory_order_relaxed);
      now_ns.store(did ? std::min(most_ns, now * 2) : std::max(least_ns, now / 2), std::memory_order_relaxed);
    }
    const uint64_t least_ns, most_ns;
    std::atomic<uint64_t> now_ns;
  };
  Time spin_, yield_;
};

class SpinPolicy {
 public:
  explicit SpinPolicy(WaitHabit& habit) : habit_(habit) { begin(); }
  void reset() {  // something came, or sleep was over
    if (since_ != 0) habit_.spinning_paid(!yielded_);
    if (yielded_) habit_.waited(lightcc::now_ns() - since_);
    begin();
  }
  bool wait_a_little() {  // false: patience is used up, sleep
    if (!yielded_ && !habit_.oversubscribed() && ++turns_ % kTurnsPerLook != 0) return cpu_relax(), true;
    uint64_t now = lightcc::now_ns();
    if (since_ == 0) since_ = now;
    if (now - since_ < spin_ns_) return true;
    yielded_ = true;
    if (now - since_ < spin_ns_ + yield_ns_) {
      sched_yield();
      // Where cores are shared and yet nobody took ours, the kernel does not let those run whom we wait for (they are
      // in another scheduling group): only sleep does.
      idle_yields_ = lightcc::now_ns() - now < kNobodyNs ? idle_yields_ + 1 : 0;
      return idle_yields_ < kIdleYields || !habit_.oversubscribed();
    }
    return false;
  }

 private:
  void begin() {
    spin_ns_ = habit_.spin_ns();
    yield_ns_ = habit_.yield_ns();
    turns_ = 0;
    since_ = 0;
    yielded_ = false;
    idle_yields_ = 0;
  }
  static constexpr unsigned kTurnsPerLook = 8;  // a look at the clock costs as much as a few turns
  static constexpr uint64_t kNobodyNs = 1'000;
  static constexpr int kIdleYields = 64;
  WaitHabit& habit_;
  uint64_t spin_ns_, yield_ns_;
  unsigned turns_;
  uint64_t since_;
  bool yielded_;
  int idle_yields_;
};

}  // namespace lightcc
