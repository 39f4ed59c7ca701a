// Bits that are set once each, and how many are.
#pragma once
#include <cstdint>
#include <vector>

namespace harp {

class Bitmap {
 public:
  void reset(uint32_t bits) {  // all clear; keeps its memory
    words_.assign((bits + 63) / 64, 0);
    set_ = 0;
  }
  bool set(uint32_t bit) {  // false: it was set
    uint64_t& word = words_[bit / 64];
    const uint64_t mask = uint64_t(1) << bit % 64;
    if (word & mask) return false;
    word |= mask;
    ++set_;
    return true;
  }
  bool test(uint32_t bit) const { return words_[bit / 64] >> bit % 64 & 1; }
  uint32_t count() const { return set_; }

 private:
  std::vector<uint64_t> words_;
  uint32_t set_ = 0;
};

}  // namespace harp
