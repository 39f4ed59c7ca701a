// The one thread that makes the calls of csrc/embedding/table.h for all operations, in the order in which TensorFlow
// has run them. A kernel hands its call over and returns: were it to wait for other ranks itself, it would hold one of
// TensorFlow's threads, and with one such thread the reductions of dense gradients that the others wait for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "embedding/table.h"

namespace lightcc::tf {

class CallThread {
 public:
  void post(std::function<void()> task);   // any thread
  void drop(lightcc_embedding_call* call);  // any thread

  // These on this thread only. finish waits until a call is done, and says with which lightcc_status; text gets the
  // error's. release_dropped goes before a call: between calls the program may use the tables itself.
  int finish(lightcc_embedding_call* call, std::string* text);
  void release_dropped();
  int64_t calls() const { return calls_; }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> tasks_;
  std::vector<lightcc_embedding_call*> dropped_;
  bool started_ = false;
  std::atomic<int64_t> calls_{0};
};

CallThread& call_thread();

}  // namespace lightcc::tf
