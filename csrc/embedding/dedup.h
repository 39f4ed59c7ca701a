// Different keys of a batch, in order of first appearance.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "embedding/hash.h"

namespace lightcc::embedding {

class Dedup {
 public:
  // Forgets all keys. At most so many will come; memory is kept for the next time.
  void begin(size_t most_keys) {
    mask_ = std::bit_ceil(most_keys * 2) - 1;  // at most half of the slots get used
    slots_.assign(mask_ + 1, 0);
    found_ = 0;
  }
  // unique has room for all keys, inverse for these. fresh(hash, i) comes for each that differs from all before it.
  template <class Fresh> void add(std::span<const int64_t> keys, int64_t* unique, int64_t* inverse, Fresh fresh) {
    constexpr size_t kBlock = 32;
    const size_t mask = mask_;
    uint32_t* slots = slots_.data();
    uint64_t hashes[kBlock];
    uint32_t found = found_;
    for (size_t first = 0; first < keys.size(); first += kBlock) {
      const size_t n = std::min(kBlock, keys.size() - first);
      for (size_t i = 0; i < n; ++i) {
        hashes[i] = mix(uint64_t(keys[first + i]));
        __builtin_prefetch(&slots[hashes[i] & mask], 1);
      }
      for (size_t i = 0; i < n; ++i) {
        const int64_t key = keys[first + i];
        size_t at = hashes[i] & mask;
        while (slots[at] && unique[slots[at] - 1] != key) at = (at + 1) & mask;
        if (!slots[at]) {
          unique[found] = key;
          slots[at] = ++found;
          fresh(hashes[i], first + i);
        }
        inverse[first + i] = slots[at] - 1;
      }
    }
    found_ = found;
  }
  int64_t count() const { return found_; }  // of different keys
  // All of that at once; returns how many differ.
  int64_t run(std::span<const int64_t> keys, int64_t* unique, int64_t* inverse) {
    begin(keys.size());
    add(keys, unique, inverse, [](uint64_t, size_t) {});
    return count();
  }

 private:
  std::vector<uint32_t> slots_;  // a place in unique, plus 1; 0: empty
  size_t mask_ = 0;
  uint32_t found_ = 0;
};

}  // namespace lightcc::embedding
