#include "base/deadline.h"

#include <sys/eventfd.h>
#include <time.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"

namespace lightcc {

Cancellation::Cancellation() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) throw system_error("creating an eventfd");
}

void Cancellation::cancel(const Error& why) {
  if (claimed_.exchange(true)) return;
  why_ = why;
  cancelled_.store(true, std::memory_order_release);
  eventfd_write(event_.get(), 1);
}

bool Deadline::over() const { return cancelled() || now_ns() >= ns; }

int poll_until(std::vector<pollfd>& polled, const Deadline& deadline, uint64_t most_ns) {
  constexpr uint64_t kMs = 1'000'000, kMostMs = 1000;
  const uint64_t now = now_ns();
  const uint64_t wait_ns = std::min(most_ns, deadline.ns - std::min(deadline.ns, now));
  if (deadline.cancellation) polled.push_back({deadline.cancellation->fd(), POLLIN, 0});
  int ready = ::poll(polled.data(), polled.size(), int(std::min(wait_ns / kMs + 1, kMostMs)));
  if (deadline.cancellation) {
    ready -= ready > 0 && polled.back().revents;
    polled.pop_back();
  }
  return ready;
}

bool wait_for(int fd, short events, const Deadline& deadline, const char* attempted) {
  std::vector<pollfd> one{{fd, events, 0}};
  while (!deadline.over()) {
    const int ready = poll_until(one, deadline, UINT64_MAX);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw system_error(attempted);
  }
  return false;
}

bool sleep_until(const Deadline& deadline, uint64_t ns) {
  if (deadline.over()) return false;
  const uint64_t now = now_ns();
  const timespec pause{0, long(std::min(ns, deadline.ns - std::min(deadline.ns, now)))};
  nanosleep(&pause, nullptr);
  return true;
}

}  // namespace lightcc
