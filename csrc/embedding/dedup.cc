#include "embedding/dedup.h"

#include <algorithm>
#include <bit>

#include "embedding/hash.h"

namespace lightcc::embedding {

int64_t Dedup::run(std::span<const int64_t> keys, int64_t* unique, int64_t* inverse) {
  constexpr size_t kBlock = 32;
  const size_t count = std::bit_ceil(keys.size() * 2 + 1), mask = count - 1;
  slots_.assign(count, 0);
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
      }
      inverse[first + i] = slots[at] - 1;
    }
  }
  return found;
}

}  // namespace lightcc::embedding
