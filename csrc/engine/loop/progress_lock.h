// The progress lock: its holder makes an engine's steps and may touch the engine's state. It is only ever tried, so
// that nobody sleeps for it. Everything that must hold it begins with assert_held(). In debug and sanitizer builds the
// lock knows the thread that holds it, and assert_held() in any other thread ends the process; in release builds both
// cost nothing.
#pragma once
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace lightcc {

#if !defined(NDEBUG) || defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kProgressLockIsAsserted = true;
#else
inline constexpr bool kProgressLockIsAsserted = false;
#endif

class ProgressLock {
 public:
  bool try_lock() {
    if (held_.exchange(true, std::memory_order_seq_cst)) return false;
    if constexpr (kProgressLockIsAsserted) holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return true;
  }
  void unlock(const char* caller = __builtin_FUNCTION()) {
    assert_held(caller);
    if constexpr (kProgressLockIsAsserted) holder_.store(std::thread::id(), std::memory_order_relaxed);
    held_.store(false, std::memory_order_seq_cst);
  }
  bool is_held() const { return held_.load(std::memory_order_relaxed); }  // by whomever, and maybe no more
  void assert_held(const char* caller = __builtin_FUNCTION()) const {
    if constexpr (kProgressLockIsAsserted) {
      if (holder_.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
      std::fprintf(stderr, "lightcc: %s() is called by a thread that does not hold the progress lock\n", caller);
      std::abort();
    }
  }

 private:
  std::atomic<bool> held_{false};
  std::atomic<std::thread::id> holder_{};
};

}  // namespace lightcc
