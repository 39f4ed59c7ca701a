#include "harp_plugin/core/received_numbers.h"

#include <algorithm>
#include <bit>

namespace harp {

void ReceivedNumbers::insert(uint64_t number) {
  if (number >= next_) {
    const uint64_t from = next_ / 64 + (next_ % 64 != 0), to = number / 64;  // words that begin now
    for (uint64_t w = std::max(from, to - std::min(to, words_.size() - 1)); w <= to; ++w) words_[w % words_.size()] = 0;
    next_ = number + 1;
  } else if (contains(number)) {
    return;
  }
  word(number) |= uint64_t(1) << number % 64;
}

// Where the run of equal bits that ends before `end` begins.
uint64_t ReceivedNumbers::run_before(uint64_t end, bool set, uint64_t lowest) const {
  while (end > lowest) {
    const uint64_t last = end - 1, base = last & ~uint64_t(63);
    uint64_t others = set ? ~word(last) : word(last);
    others &= ~uint64_t(0) >> (63 - last % 64);
    if (others != 0) return std::max(lowest, base + 64 - uint64_t(std::countl_zero(others)));
    end = base;
  }
  return lowest;
}

void ReceivedNumbers::ranges(AckBody* ack) const {
  const uint64_t lowest = this->lowest();
  ack->count = 0;
  for (uint64_t end = next_; end > lowest && ack->count < kMostRanges;) {
    const uint64_t begin = run_before(end, true, lowest);
    ack->ranges[ack->count++] = {begin, end - 1};
    end = run_before(begin, false, lowest);
  }
}

}  // namespace harp
