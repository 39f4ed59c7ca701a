// Notices the death of peers: one thread asleep in poll() on a pidfd of each. The kernel wakes it within
// milliseconds of an end by any means, whatever children of the peer live on. Between hosts the same thread sends and
// receives the heartbeats, and asks hosts that are not heard.
#pragma once
#include <functional>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace lightcc {

class ProcessWatch {
 public:
  struct Also {                          // what else the watching thread does
    std::function<void()> tick{};        // every period
    uint64_t period_ns = 0;
    int descriptor = -1;                 // -1: none; it outlives the watch
    std::function<void()> on_readable{};
  };
  // on_end(i) is called once, on the watching thread, when the process behind pidfds[i] has ended.
  // A closed Fd in pidfds is not watched.
  ProcessWatch(std::vector<Fd> pidfds, std::function<void(int)> on_end, Also also);
  ProcessWatch(std::vector<Fd> pidfds, std::function<void(int)> on_end)
      : ProcessWatch(std::move(pidfds), std::move(on_end), Also{}) {}
  ~ProcessWatch();
  static Fd own_pidfd();
  void close_in_child() { pidfds_.clear(), stop_ = Fd(); }  // after fork(), where the thread does not exist

 private:
  void run();
  std::vector<Fd> pidfds_;
  std::function<void(int)> on_end_;
  const Also also_;
  Fd stop_;
  std::thread thread_;
};

}  // namespace lightcc
