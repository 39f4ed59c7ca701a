// Different keys of a batch, in order of first appearance.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace lightcc::embedding {

class Dedup {
 public:
  // Both have room for as many as keys. Returns how many differ. Memory is kept for the next call.
  int64_t run(std::span<const int64_t> keys, int64_t* unique, int64_t* inverse);

 private:
  std::vector<uint32_t> slots_;  // a place in unique, plus 1; 0: empty
};

}  // namespace lightcc::embedding
