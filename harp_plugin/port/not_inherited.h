// Descriptors that a forked child closes at once, before fork() returns there: what they hold, a port, a NIC's queue or
// an XDP program, is to end with the parent, however long the child lives.
#pragma once
#include <atomic>
#include <utility>

namespace harp {

class NotInherited {
 public:
  explicit NotInherited(int descriptor);
  NotInherited(NotInherited&& other) noexcept : slot_(std::exchange(other.slot_, nullptr)) {}
  NotInherited& operator=(NotInherited&& other) noexcept {
    std::swap(slot_, other.slot_);
    return *this;
  }
  ~NotInherited() {
    if (slot_) slot_->store(-1, std::memory_order_release);
  }

 private:
  std::atomic<int>* slot_;  // nullptr: there were too many
};

}  // namespace harp
