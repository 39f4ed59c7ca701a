#include "net/health/process_watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {

Fd ProcessWatch::own_pidfd() {
  Fd fd(int(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!fd) throw system_error("opening a pidfd of this process (Linux 5.3 or newer is needed)");
  return fd;
}

ProcessWatch::ProcessWatch(std::vector<Fd> pidfds, std::function<void(int)> on_end, Also also)
    : pidfds_(std::move(pidfds)),
      on_end_(std::move(on_end)),
      also_(std::move(also)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) throw system_error("creating an eventfd");
  thread_ = std::thread([this] { run(); });
}

ProcessWatch::~ProcessWatch() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void ProcessWatch::run() {
  std::vector<pollfd> waits;
  for (const Fd& fd : pidfds_) waits.push_back({fd.get(), POLLIN, 0});  // poll ignores -1
  const size_t processes = waits.size();
  waits.push_back({also_.descriptor, POLLIN, 0});
  waits.push_back({stop_.get(), POLLIN, 0});
  for (uint64_t next_ns = 0;;) {  // the first tick is at once
    if (const uint64_t now = now_ns(); also_.tick && now >= next_ns) {
      also_.tick();
      next_ns = now + also_.period_ns;
    }
    const int timeout_ms = also_.tick ? int((next_ns - std::min(next_ns, now_ns())) / 1'000'000 + 1) : -1;
    if (poll(waits.data(), waits.size(), timeout_ms) < 0) continue;  // EINTR
    if (waits.back().revents) return;
    if (waits[processes].revents) also_.on_readable();
    for (size_t i = 0; i < processes; ++i) {
      if (!waits[i].revents) continue;
      waits[i].fd = -1;
      on_end_(int(i));
    }
  }
}

}  // namespace lightcc
