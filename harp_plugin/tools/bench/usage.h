// What a side of a run has used: time, CPU of all threads of this process, and what the machine was busy with, so that
// work which the kernel does in threads of its own is not lost.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "base/json.h"

namespace harp::bench {

struct Usage {
  uint64_t at_ns = 0, user_ns = 0, system_ns = 0;
  uint64_t machine_busy_ns = 0, machine_softirq_ns = 0;  // in steps of the kernel's clock tick
};

Usage usage_now();
Usage operator-(const Usage& end, const Usage& begin);
lightcc::JsonObject json_of(const Usage& used, uint64_t bytes);  // seconds, and nanoseconds a byte unless bytes are 0

// The measured part of a side's run. Any thread may call; begin() counts once, and the last of `ends` calls of end().
class Window {
 public:
  explicit Window(uint64_t ends) : ends_left_(ends) {}
  void begin() {
    if (!begun_.exchange(true)) first_ = usage_now();
  }
  void end() {
    if (ends_left_.fetch_sub(1) == 1) last_ = usage_now();
  }
  Usage used() const { return last_ - first_; }  // after all threads have ended

 private:
  std::atomic<bool> begun_{false};
  std::atomic<uint64_t> ends_left_;
  Usage first_, last_;
};

}  // namespace harp::bench
