// Which packet numbers a connection has received: a window of bits behind the highest.
#pragma once
#include <array>
#include <cstdint>

#include "harp_plugin/core/packet.h"

namespace harp {

class ReceivedNumbers {
 public:
  static constexpr uint64_t kWindow = 8192;

  explicit ReceivedNumbers(uint64_t first = 0) : first_(first), next_(first) {}

  uint64_t expected() const { return next_; }  // one past the highest
  bool any() const { return next_ > first_; }
  // true too for what is too old to tell.
  bool contains(uint64_t number) const {
    if (number >= next_) return false;
    if (number < first_ || next_ - number > kWindow) return true;
    return word(number) >> number % 64 & 1;
  }
  void insert(uint64_t number);
  void ranges(AckBody*) const;  // the newest, at most kMostRanges; only if any()

 private:
  uint64_t lowest() const { return next_ - first_ > kWindow ? next_ - kWindow : first_; }
  uint64_t word(uint64_t number) const { return words_[number / 64 % words_.size()]; }
  uint64_t& word(uint64_t number) { return words_[number / 64 % words_.size()]; }
  uint64_t run_before(uint64_t end, bool set, uint64_t lowest) const;

  uint64_t first_, next_;
  std::array<uint64_t, kWindow / 64 + 1> words_{};  // one more, so that a word is cleared before it is used again
};

}  // namespace harp
