// What is not the data path: commands to an engine with an acknowledgement, and what several application threads share.
// The only locks of the engine are here.
#pragma once
#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

namespace harp {

// A value that several threads use, one at a time.
template <class T>
class Guarded {
 public:
  template <class F>
  auto with(F&& use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return use(value_);
  }

 private:
  std::mutex mutex_;
  T value_;
};

// That a command is done. It lives on the waiting thread's stack: give() does not touch it after wait() can return.
class Acknowledgement {
 public:
  void give(std::exception_ptr error = nullptr);
  // Until it is given. `help`, if set, is called between short waits: in inline mode the waiter does the work itself.
  // Rethrows what the command threw.
  void wait(const std::function<void()>& help);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool given_ = false;
  std::exception_ptr error_;
};

// Commands for the engine. Any thread posts, the one that runs the engine takes.
class Mailbox {
 public:
  void post(std::function<void()> command);
  std::vector<std::function<void()>> take();
  bool empty() const { return !filled_.load(); }

 private:
  std::atomic<bool> filled_{false};
  Guarded<std::vector<std::function<void()>>> commands_;
};

}  // namespace harp
