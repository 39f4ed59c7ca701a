// Notices the death of peers: one thread asleep in poll() on a pidfd of each. The kernel wakes it within
// milliseconds of an end by any means, whatever children of the peer live on. Between hosts the same thread sends and
// receives the heartbeats.
#pragma once
#include <functional>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace lightcc {

class ProcessWatch {
 public:
  // on_end(i) is called once, on the watching thread, when the process behind pidfds[i] has ended.
  // A closed Fd in pidfds is not watched.
  // tick(), if there is one, is called on the same thread every period.
  ProcessWatch(std::vector<Fd> pidfds, std::function<void(int)> on_end, std::function<void()> tick = {},
               uint64_t period_ns = 0);
  ~ProcessWatch();
  static Fd own_pidfd();
  void close_in_child() { pidfds_.clear(), stop_ = Fd(); }  // after fork(), where the thread does not exist

 private:
  void run();
  std::vector<Fd> pidfds_;
  std::function<void(int)> on_end_;
  std::function<void()> tick_;
  const uint64_t period_ns_;
  Fd stop_;
  std::thread thread_;
};

}  // namespace lightcc
