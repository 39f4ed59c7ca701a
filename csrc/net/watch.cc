#include "net/watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

#include "base/error.h"

namespace lightcc {

Fd Watch::own_pidfd() {
  Fd fd(int(syscall(SYS_pidfd_open, getpid(), 0)));
  if (!fd) throw system_error("opening a pidfd of this process (Linux 5.3 or newer is needed)");
  return fd;
}

Watch::Watch(std::vector<Fd> pidfds, std::function<void(int)> on_end)
    : pidfds_(std::move(pidfds)), on_end_(std::move(on_end)), stop_(eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) throw system_error("creating an eventfd");
  thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t n = write(stop_.get(), &one, sizeof one);
  thread_.join();
}

void Watch::run() {
  std::vector<pollfd> waits;
  for (const Fd& fd : pidfds_) waits.push_back({fd.get(), POLLIN, 0});  // poll ignores -1
  waits.push_back({stop_.get(), POLLIN, 0});
  for (;;) {
    if (poll(waits.data(), waits.size(), -1) < 0) continue;  // EINTR
    if (waits.back().revents) return;
    for (size_t i = 0; i + 1 < waits.size(); ++i) {
      if (!waits[i].revents) continue;
      waits[i].fd = -1;
      on_end_(int(i));
    }
  }
}

}  // namespace lightcc
