// What kernels of codecs have in common: sums and products with the bits of the CPU, gradients of three types, and
// numbers in messages, which begin at any address.
#pragma once
#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

#include "device/codec.h"
#include "device/cuda/block.h"
#include "device/cuda/scale.h"
#include "device/half.h"

namespace lightcc::gpu {

constexpr uint32_t kInfinityBits = 0x7f800000u, kBeyondAllBits = 0x80000000u;  // of magnitudes

LIGHTCC_DEVICE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
LIGHTCC_DEVICE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
LIGHTCC_DEVICE uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

// A GPU has one NaN, a CPU hands on the first it finds, made quiet, or makes its own (scale.h).
LIGHTCC_DEVICE float nan_of(float a, float b) {
  constexpr uint32_t quiet = 0x400000u;
  if (a != a) return float_of(bits_of(a) | quiet);
  if (b != b) return float_of(bits_of(b) | quiet);
  return float_of(scaling::kOwnNanIsNegative ? 0xffc00000u : 0x7fc00000u);
}
LIGHTCC_DEVICE float sum_of(float a, float b) {
  const float sum = add(a, b);
  return sum == sum ? sum : nan_of(a, b);
}
LIGHTCC_DEVICE float product_of(float a, float b) {
  const float product = multiply(a, b);
  return product == product ? product : nan_of(a, b);
}

template <class T>
LIGHTCC_DEVICE T least_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
LIGHTCC_DEVICE T most_of(T a, T b) {
  return a < b ? b : a;
}

// ---- types of gradients; `type` is a DType (base/types.h)

constexpr uint32_t kFloat16 = 6, kFloat32 = 7, kBfloat16 = 10;

struct Float32Elements {
  using Stored = uint32_t;
  LIGHTCC_DEVICE static float number(uint32_t x) { return float_of(x); }
  LIGHTCC_DEVICE static uint32_t stored(float x) { return bits_of(x); }
};
struct Float16Elements {
  using Stored = uint16_t;
  LIGHTCC_DEVICE static float number(uint16_t x) {
#if defined(__CUDACC__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    if (wide == wide) return wide;
#endif
    return float_of_float16(x);
  }
  LIGHTCC_DEVICE static uint16_t stored(float x) {
#if defined(__CUDACC__)
    if (x == x) {
      uint16_t narrow;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(x));
      return narrow;
    }
#endif
    return float16_of_float(x);
  }
};
struct Bfloat16Elements {
  using Stored = uint16_t;
  LIGHTCC_DEVICE static float number(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }
  LIGHTCC_DEVICE static uint16_t stored(float x) { return bfloat16_of_float(x); }
};

template <class Body>
LIGHTCC_DEVICE void with_elements(uint32_t type, Body body) {
  if (type == kFloat32) body(Float32Elements{});
  else if (type == kFloat16) body(Float16Elements{});
  else body(Bfloat16Elements{});
}

// Says that it is an address of global memory, which loads that go there alone are quicker for.
template <class T>
LIGHTCC_DEVICE T* global(T* p) {
#if defined(__CUDACC__)
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// ---- four neighbours at once, where they begin at a multiple of their size

template <class T>
struct Four {
  T at[4];
};
template <class T>
struct alignas(4 * sizeof(T)) FourWords {
  uint32_t words[sizeof(T)];
};

template <class T>
LIGHTCC_DEVICE bool holds_fours(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

// NVRTC 12.4 knows their sizes only where something has asked for them.
template <class T>
constexpr bool kIsFour = sizeof(Four<T>) == sizeof(FourWords<T>);

// Elements at, at + 1, at + 2 and at + 3 of n; zeros beyond. fours: they may be read at once.
template <class T>
LIGHTCC_DEVICE Four<T> load_four(const T* from, uint32_t at, uint32_t n, bool fours) {
  static_assert(kIsFour<T>);
  if (fours && at + 4 <= n)
    return __builtin_bit_cast(Four<T>, *reinterpret_cast<const FourWords<T>*>(from + at));
  Four<T> four;
  LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j) four.at[j] = at + j < n ? from[at + j] : T{};
  return four;
}
template <class T>
LIGHTCC_DEVICE void store_four(T* to, uint32_t at, uint32_t n, bool fours, const Four<T>& four) {
  static_assert(kIsFour<T>);
  if (fours && at + 4 <= n) {
    *reinterpret_cast<FourWords<T>*>(to + at) = __builtin_bit_cast(FourWords<T>, four);
    return;
  }
  LIGHTCC_UNROLLED for (uint32_t j = 0; j < 4; ++j)
    if (at + j < n) to[at + j] = four.at[j];
}

// ---- numbers at any address

LIGHTCC_DEVICE void store(uint8_t* to, uint16_t x) {
  if (reinterpret_cast<uintptr_t>(to) % 2 == 0) {
    *reinterpret_cast<uint16_t*>(to) = x;
    return;
  }
  to[0] = static_cast<uint8_t>(x);
  to[1] = static_cast<uint8_t>(x >> 8);
}
LIGHTCC_DEVICE void store(uint8_t* to, uint32_t x) {
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = x;
    return;
  }
  store(to, static_cast<uint16_t>(x));
  store(to + 2, static_cast<uint16_t>(x >> 16));
}
LIGHTCC_DEVICE uint16_t load16(const uint8_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 2 == 0) return *reinterpret_cast<const uint16_t*>(from);
  return static_cast<uint16_t>(from[0] | from[1] << 8);
}
LIGHTCC_DEVICE uint32_t load32(const uint8_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 4 == 0) return *reinterpret_cast<const uint32_t*>(from);
  return load16(from) | static_cast<uint32_t>(load16(from + 2)) << 16;
}

}  // namespace lightcc::gpu
