#include "harp_plugin/engine/control.h"

#include <chrono>
#include <utility>

namespace harp {

namespace {
constexpr std::chrono::microseconds kHelpEvery{20};
}

// Notifies with the lock held, and wait() looks with the lock held: it cannot return, and end this object's life,
// before this is over.
void Acknowledgement::give(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  given_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

void Acknowledgement::wait(const std::function<void()>& help) {
  const auto given = [this] { return given_; };
  while (true) {
    if (help) help();
    std::unique_lock<std::mutex> lock(mutex_);
    if (!help) changed_.wait(lock, given);
    if (!given_ && !changed_.wait_for(lock, kHelpEvery, given)) continue;
    if (error_) std::rethrow_exception(error_);
    return;
  }
}

void Mailbox::post(std::function<void()> command) {
  commands_.with([&](auto& commands) {
    commands.push_back(std::move(command));
    filled_ = true;
  });
}

std::vector<std::function<void()>> Mailbox::take() {
  if (empty()) return {};
  return commands_.with([&](auto& commands) {
    filled_ = false;
    return std::exchange(commands, {});
  });
}

}  // namespace harp
