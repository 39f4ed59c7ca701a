// Sleeping on a word of memory that processes share.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace lightcc {

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, uint64_t timeout_ns) {
  timespec t{time_t(timeout_ns / 1'000'000'000), long(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, timeout_ns == UINT64_MAX ? nullptr : &t, nullptr, 0);
}
inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// One thread or several sleep here; others wake them by ring(). The word and the counts lie in memory that all of them
// map. A sleeper counts itself first, looks for work once more, and sleeps only if it found none: what is written
// before ring() is seen by that look or wakes the sleeper.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> word{0}, sleepers{0};
  std::atomic<uint32_t> polled{0};  // somebody sleeps in poll(), where only an eventfd wakes it (LocalRanks::wake)

  void ring() {  // the caller has made its writes visible and passed a seq_cst fence
    if (sleepers.load(std::memory_order_relaxed) == 0) return;
    word.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(word);
  }
  // look() returns true if there is a reason not to sleep.
  template <class Look> void sleep(uint64_t timeout_ns, Look look) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    uint32_t seen = word.load(std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!look()) futex_wait(word, seen, timeout_ns);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  // The same for one thread at a time whose wait() ends when the eventfd is written to.
  template <class Look, class Wait> void poll(Look look, Wait wait) {
    polled.exchange(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!look()) wait();
    polled.exchange(0, std::memory_order_seq_cst);
  }
};

}  // namespace lightcc
