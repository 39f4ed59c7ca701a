// For whom the members of a group wait: how long requests that all others had announced waited for one member alone. A
// moment counts once, however many requests waited then. Callers give the time; no clock, no threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lightcc {

class Lateness {
 public:
  explicit Lateness(size_t members) : waited_ns_(members) {}

  uint64_t now_ns() const { return now_ns_; }    // of the last announcement
  void set_now(uint64_t now_ns) { now_ns_ = now_ns; }
  // This member was the last to announce something, now; the one before it did at since_ns.
  void note_last(int member, uint64_t since_ns) {
    since_ns = std::max(since_ns, counted_ns_);
    if (waited_ns_.size() == 1 || now_ns_ <= since_ns) return;
    waited_ns_[size_t(member)] += now_ns_ - since_ns;
    counted_ns_ = now_ns_;
  }
  const std::vector<uint64_t>& waited_ns() const { return waited_ns_; }  // by member

 private:
  std::vector<uint64_t> waited_ns_;
  uint64_t now_ns_ = 0, counted_ns_ = 0;         // what is before is counted
};

}  // namespace lightcc
