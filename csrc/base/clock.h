// Time and waiting, the two things that code which decides never does itself.
#pragma once
#include <sched.h>
#include <time.h>

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

// How a thread passes the time before it sleeps: first it spins, then it offers its core to others. Both
// lengths are fixed when the engine starts, by cores and ranks.
class Patience {
 public:
  struct Limits { uint64_t spin_ns, yield_ns; };
  explicit Patience(Limits limits) : limits_(limits) {}
  void reset() { turns_ = 0, since_ = 0; }
  bool wait_a_little() {  // false: patience is used up, sleep
    if (++turns_ % kTurnsPerLook != 0) return cpu_relax(), true;
    uint64_t now = now_ns();
    if (since_ == 0) since_ = now;
    if (now - since_ < limits_.spin_ns) return true;
    if (now - since_ >= limits_.spin_ns + limits_.yield_ns) return false;
    return sched_yield(), true;
  }

 private:
  static constexpr unsigned kTurnsPerLook = 8;  // a look at the clock costs as much as a few turns
  Limits limits_;
  unsigned turns_ = 0;
  uint64_t since_ = 0;
};

}  // namespace lightcc
