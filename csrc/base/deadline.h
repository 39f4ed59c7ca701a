// How long a wait may last: until its time has come, or until another thread cancels it.
#pragma once
#include <poll.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace lightcc {

// Ends, once and for all, every wait whose Deadline names it. Outlives these.
class Cancellation {
 public:
  Cancellation();
  void cancel(const Error& why);  // any thread; the first counts
  bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }
  Error why() const { return *why_; }     // once it is cancelled
  int fd() const { return event_.get(); }  // readable once it is

 private:
  const Fd event_;
  std::optional<Error> why_;  // written once, before cancelled_
  std::atomic<bool> claimed_{false}, cancelled_{false};
};

struct Deadline {
  Deadline(uint64_t at_ns, const Cancellation* by = nullptr) : ns(at_ns), cancellation(by) {}
  uint64_t ns;                       // CLOCK_MONOTONIC
  const Cancellation* cancellation;  // nullptr: nobody cancels it

  Deadline at(uint64_t other_ns) const { return {other_ns, cancellation}; }  // at another time, cancelled by the same
  bool cancelled() const { return cancellation && cancellation->cancelled(); }
  bool over() const;
  // Why a wait that is over has failed: it was cancelled, or else `late`.
  Error error(const Error& late) const { return cancelled() ? cancellation->why() : late; }
};

// As poll(2), until the deadline is over or for most_ns.
int poll_until(std::vector<pollfd>&, const Deadline&, uint64_t most_ns);
// False: the deadline is over. Throws Error{internal}, beginning with what was attempted, if the system refuses.
bool wait_for(int fd, short events, const Deadline&, const char* attempted);
// False: the deadline is over. A few ms at most, so that callers look around.
bool sleep_until(const Deadline&, uint64_t ns = 2'000'000);

}  // namespace lightcc
