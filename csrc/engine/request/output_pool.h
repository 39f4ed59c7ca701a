// Memory of outputs that is kept for the next outputs: new pages cost more than the exchange that fills them. It is
// private to the process, one block an output. Invariants:
// 1. A block is out (an output lies in it) or kept, and is kept only after its output has been given back.
// 2. What is kept is at most `most_bytes`, and none of it for longer than `idle_ns`; what was kept longest goes first.
// 3. A pool belongs to one epoch. Once close() was called, when the epoch ends, it keeps nothing: blocks that are out,
//    perhaps with an operation that failed in the middle, go back to the system when they are given back.
// Any thread may call.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace lightcc {

class OutputPool {
 public:
  // Smaller outputs are malloc's, which recycles them itself.
  static constexpr size_t kLeastBytes = 1 << 20;  // LIGHTCC_POOLED_BYTES

  // With watches = false nothing happens by itself: the caller calls trim().
  OutputPool(size_t most_bytes, uint64_t idle_ns, std::function<uint64_t()> clock = now_ns, bool watches = true);
  ~OutputPool();
  OutputPool(const OutputPool&) = delete;
  OutputPool& operator=(const OutputPool&) = delete;

  // Whether outputs of so many bytes come from here.
  bool serves(size_t bytes) const { return most_bytes_ > 0 && bytes >= kLeastBytes; }
  // At a page's border, with whatever an earlier output has left there. nullptr if the system has no memory.
  void* allocate(size_t bytes);
  void give_back(void*);
  void trim();
  void close();
  size_t kept_bytes() const;
  size_t most_bytes() const { return most_bytes_; }
  uint64_t idle_ns() const { return idle_ns_; }

  // Around fork(), for all pools. In a child the blocks of its parent's pools are not kept.
  static void before_fork();
  static void after_fork();
  static void in_child();

 private:
  struct Kept { void* data; size_t bytes; uint64_t since_ns; };
  void drop_oldest();
  void drop_idle(uint64_t now);
  void watch();

  const size_t most_bytes_;
  const uint64_t idle_ns_;
  const std::function<uint64_t()> clock_;
  const bool watches_;
  const int generation_;             // forks before this pool was made
  std::map<void*, size_t> out_;
  std::vector<Kept> kept_;           // by since_ns
  size_t kept_bytes_ = 0;
  bool closed_ = false, watching_ = false;
  std::condition_variable ended_;
  std::thread watcher_;              // runs while something is kept, asleep until the first of it has been idle
};

}  // namespace lightcc
