// What scaling is tested with: on the CPU, where the kernel's arithmetic runs as plain C++ (cuda_scale_test.cc), and on
// a GPU (tests/gpu/cuda_functions.cu).
#pragma once
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "base/types.h"

namespace lightcc::test {

// Not NaN: of two NaNs a CPU may take either.
inline std::vector<double> scale_factors() {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr double one_in_float32 = 1 + 0x1p-40;
  return {1,   one_in_float32, 0,     -0.0,   0.5,  1.0 / 3, -1.0 / 3, -1,       2.5,
          255, 0x1p-24,        1e-40, 1e-300, 1e30, 1e300,   infinity, -infinity};
}

// Around powers of two, infinities, NaNs of all kinds, subnormal numbers, small integers and any bits at all.
template <class T>
T scale_pattern(size_t i, std::mt19937_64& random) {
  using Unsigned = std::make_unsigned_t<T>;
  constexpr int bits = 8 * sizeof(T), fraction = bits == 64 ? 52 : 23;
  const auto any = static_cast<Unsigned>(random());
  const Unsigned sign = any << (bits - 1);
  const Unsigned all = ~Unsigned{0} >> (bits - fraction), some = any >> (bits - fraction);
  const Unsigned fractions[] = {0, 1, all ^ all >> 1, all, some};
  switch (i % 4) {
    case 0: return static_cast<T>((Unsigned{1} << random() % bits) + random() % 3 - 1);
    case 1: return static_cast<T>(sign | fractions[random() % 5] | (random() % 2 ? ~Unsigned{0} << fraction : 0));
    case 2: return static_cast<T>(any) >> random() % bits;
    default: return static_cast<T>(any);
  }
}

// At least 2^16 elements: every value of a type of at most 16 bits.
inline std::vector<std::byte> scale_elements(DType dtype) {
  constexpr size_t count = (1 << 16) + 5;
  const size_t size = size_of(dtype);
  std::vector<std::byte> all(count * size);
  std::mt19937_64 random(1);
  for (size_t i = 0; i < count; ++i) {
    auto x = static_cast<int64_t>(i);
    if (size == 4) x = scale_pattern<int32_t>(i, random);
    if (size == 8) x = scale_pattern<int64_t>(i, random);
    std::memcpy(all.data() + i * size, &x, size);  // the low bytes: x86 and ARM store them first
  }
  return all;
}

}  // namespace lightcc::test
