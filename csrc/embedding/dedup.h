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
  // Both have room for as many as keys. Returns how many differ; fresh(hash) comes for each of these, in their order.
  // Memory is kept for the next call.
  template <class Fresh> int64_t run(std::span<const int64_t> keys, int64_t* unique, int64_t* inverse, Fresh fresh) {
    constexpr size_t kBlock = 32;
    const size_t mask = std::bit_ceil(keys.size() * 2) - 1;  // at most half of the slots get used
    slots_.assign(mask + 1, 0);
    uint32_t* slots = slots_.data();
    uint64_t hashes[kBlock];
    uint32_t found = 0;
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
          fresh(hashes[i]);
        }
        inverse[first + i] = slots[at] - 1;
      }
    }
    return found;
  }
  int64_t run(std::span<const int64_t> keys, int64_t* unique, int64_t* inverse) {
    return run(keys, unique, inverse, [](uint64_t) {});
  }

 private:
  std::vector<uint32_t> slots_;  // a place in unique, plus 1; 0: empty
};

}  // namespace lightcc::embedding
