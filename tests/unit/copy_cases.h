// What copies of many pieces are tested with: on the CPU, where the kernel runs as plain C++ (cuda_pack_test.cc), and
// on a GPU (tests/gpu/cuda_functions.cu).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace lightcc::test {

struct CopyCase {
  size_t to, from, bytes;  // where its sides begin in two memories of kCopyBytes
};

inline constexpr size_t kCopyBytes = size_t(16) << 20;

// Outputs that lie one behind the other, some without a gap; inputs anywhere.
class CopyCases {
 public:
  void add(size_t bytes, size_t to_at, size_t from_at) {  // modulo 32
    end_ += (to_at - end_) % 32;
    const size_t from = below(kCopyBytes - bytes - 64) / 32 * 32 + from_at;
    all_.push_back({end_, from, bytes});
    end_ += bytes;
  }
  void add(size_t bytes) {
    const size_t to_at = below(2) == 0 ? end_ % 32 : below(32);
    add(bytes, to_at, below(32));
  }
  size_t below(size_t most) { return random_() % most; }
  std::vector<CopyCase> take() { return end_ = 0, std::move(all_); }

 private:
  std::mt19937_64 random_{1};
  size_t end_ = 0;
  std::vector<CopyCase> all_;
};

inline std::vector<std::vector<CopyCase>> copy_cases() {
  CopyCases cases;
  std::vector<std::vector<CopyCase>> all{{}};
  cases.add(0);
  all.push_back(cases.take());
  cases.add(1);
  all.push_back(cases.take());
  for (size_t bytes : {1, 15, 16, 17, 100})  // however the addresses lie to each other and to the borders of words
    for (size_t to_at = 0; to_at < 17; ++to_at)
      for (size_t from_at = 0; from_at < 17; ++from_at) cases.add(bytes, to_at, from_at);
  all.push_back(cases.take());
  for (int i = 0; i < 700; ++i) cases.add(cases.below(size_t(1) << cases.below(16)));  // one in 16 has no bytes
  all.push_back(cases.take());
  for (int at = 0; at < 10; ++at) {  // a large one among small ones
    for (int i = 0; i < 90; ++i) {
      if (i == 10 * at) cases.add(8'000'003, 0, size_t(1) << at % 6);
      cases.add(cases.below(2000), i % 32, i % 32);
    }
    all.push_back(cases.take());
  }
  for (size_t bytes : {16383, 16384, 16385, 32768, 100'000})  // around the borders of tiles
    for (size_t at : {0, 1, 8}) cases.add(bytes, 0, at);
  all.push_back(cases.take());
  return all;
}

inline std::vector<std::byte> copy_bytes(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(kCopyBytes);
  std::ranges::generate(bytes, [&] { return std::byte(random()); });
  return bytes;
}

}  // namespace lightcc::test
