#include "harp_plugin/engine/notifier.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "base/error.h"

namespace harp {

Notifier::Notifier() : bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!bell_) throw lightcc::system_error("opening a context (eventfd)");
}

bool Notifier::arm() {
  uint64_t rung;
  // Nothing to read: nobody has rung since.
  [[maybe_unused]] const ssize_t bytes = read(bell_.get(), &rung, sizeof rung);
  armed_.store(true, std::memory_order_seq_cst);
  const uint64_t news = news_.load(std::memory_order_seq_cst);
  if (news == seen_) return true;
  armed_.store(false, std::memory_order_relaxed);
  seen_ = news;
  return false;
}

void Notifier::ring() {
  if (!armed_.exchange(false, std::memory_order_seq_cst)) return;
  const uint64_t one = 1;
  // Its only failure is a counter that is full already: then it is readable.
  [[maybe_unused]] const ssize_t written = write(bell_.get(), &one, sizeof one);
}

}  // namespace harp
