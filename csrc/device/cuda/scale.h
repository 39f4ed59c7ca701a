// What the kernel that scales does (scale.cu), down to one thread's share: to[i] = factor * from[i] with the bits of
// reduce() for one input (device/kernels.h). But for conversions of float16 it is plain C++ too, so that tests compare
// the two where there is no GPU (tests/unit/device/cuda/cuda_scale_test.cc). C++17, since NVRTC
// of CUDA 11 knows no later one; base/types.h is C++20.
#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>

#include "device/half.h"

#if defined(__CUDA_ARCH__)
#define LIGHTCC_UNROLL _Pragma("unroll")
#else
#define LIGHTCC_UNROLL
#endif

namespace lightcc::scaling {

// Made on the host, where a factor that is NaN keeps its bits when it is rounded.
struct Factor {
  explicit Factor(double factor) : exact(factor), rounded(static_cast<float>(factor)) {}
  double exact;
  float rounded;
};

// ---- one element ------------------------------------------------------------------------------------------

// A CPU hands a NaN on, made quiet, and makes one of its own from infinity times 0, which x86 alone gives a sign. A GPU
// has one NaN for all of this. NVRTC does not know what the CPU is, and is told (compile.cc).
#if defined(__x86_64__) || defined(LIGHTCC_OWN_NAN_IS_NEGATIVE)
constexpr bool kOwnNanIsNegative = true;
#else
constexpr bool kOwnNanIsNegative = false;
#endif

template <class T, class Bits>
inline T product(T x, T factor) {
  const T result = x * factor;
  if (result == result) return result;
  constexpr int quiet_bit = std::numeric_limits<T>::digits - 2;
  constexpr Bits quiet = Bits{1} << quiet_bit, all = ~Bits{0};
  constexpr Bits own = all << quiet_bit & (kOwnNanIsNegative ? all : all >> 1);
  if (x != x) return __builtin_bit_cast(T, __builtin_bit_cast(Bits, x) | quiet);
  if (factor != factor) return __builtin_bit_cast(T, __builtin_bit_cast(Bits, factor) | quiet);
  return __builtin_bit_cast(T, own);
}

// ---- formats: how elements are stored, and what becomes of one ----------------------------------------------
// A factor of exactly 1 leaves integers that double cannot hold, and NaNs that are not quiet, as they are.

template <class T>
struct Integer {
  using Stored = T;
  static constexpr T kLeast = std::numeric_limits<T>::min(), kMost = std::numeric_limits<T>::max();
  static T scaled(T x, const Factor& factor) {
    return factor.exact == 1 ? x : truncated(static_cast<double>(x) * factor.exact);
  }
  // Towards zero; what does not fit becomes the nearest number that does, NaN becomes 0.
  static T truncated(double x) {
    if (x != x) return 0;
    if (x <= static_cast<double>(kLeast)) return kLeast;
    if (x >= static_cast<double>(kMost)) return kMost;  // of 64 bits: rounded up
    return static_cast<T>(x);
  }
};
struct Float32 {
  using Stored = uint32_t;
  static uint32_t scaled(uint32_t x, const Factor& factor) {
    if (factor.exact == 1) return x;
    return __builtin_bit_cast(uint32_t, product<float, uint32_t>(__builtin_bit_cast(float, x), factor.rounded));
  }
};
struct Float64 {
  using Stored = uint64_t;
  static uint64_t scaled(uint64_t x, const Factor& factor) {
    if (factor.exact == 1) return x;
    return __builtin_bit_cast(uint64_t, product<double, uint64_t>(__builtin_bit_cast(double, x), factor.exact));
  }
};
struct ScaledFloat16 {  // computed in float32; a NaN comes out quiet whatever the factor
  using Stored = uint16_t;
  static uint16_t scaled(uint16_t x, const Factor& factor) {
#if defined(__CUDA_ARCH__)
    // A GPU converts in one instruction each way, and only NaNs otherwise than half.h.
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
    const float result = wide * factor.rounded;
    if (result == result) {
      uint16_t narrow;
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(result));
      return narrow;
    }
#endif
    return float16_of_float(product<float, uint32_t>(float_of_float16(x), factor.rounded));
  }
};
struct ScaledBfloat16 {
  using Stored = uint16_t;
  static uint16_t scaled(uint16_t x, const Factor& factor) {
    return bfloat16_of_float(product<float, uint32_t>(float_of_bfloat16(x), factor.rounded));
  }
};
struct ScaledBoolean {  // any byte but 0 is true, and no factor changes that
  using Stored = uint8_t;
  static uint8_t scaled(uint8_t x, const Factor&) { return x != 0; }
};

// Calls with the format of a DType, in the order of base/types.h. false: there is no such DType.
template <class Body>
bool with_format(int dtype, Body&& body) {
  switch (dtype) {
    case 0: return body(Integer<uint8_t>{}), true;
    case 1: return body(Integer<int8_t>{}), true;
    case 2: return body(Integer<uint16_t>{}), true;
    case 3: return body(Integer<int16_t>{}), true;
    case 4: return body(Integer<int32_t>{}), true;
    case 5: return body(Integer<int64_t>{}), true;
    case 6: return body(ScaledFloat16{}), true;
    case 7: return body(Float32{}), true;
    case 8: return body(Float64{}), true;
    case 9: return body(ScaledBoolean{}), true;
    case 10: return body(ScaledBfloat16{}), true;
    case 11: return body(Integer<uint32_t>{}), true;
    case 12: return body(Integer<uint64_t>{}), true;
  }
  return false;
}

// ---- one thread's share ---------------------------------------------------------------------------------------

// What a thread reads and writes at once.
struct alignas(16) Vector {
  uint32_t words[4];
};

template <class Format>
inline Vector scaled(const Vector& from, const Factor& factor) {
  using Stored = typename Format::Stored;
  struct alignas(16) Elements {
    Stored at[sizeof(Vector) / sizeof(Stored)];
  } elements = __builtin_bit_cast(Elements, from);
  LIGHTCC_UNROLL for (Stored& x : elements.at) x = Format::scaled(x, factor);
  return __builtin_bit_cast(Vector, elements);
}

// Every `threads`-th vector from `thread` on, and so with the elements before the first and after the last vector.
// Vectors begin where both addresses are multiples of their size; if that is nowhere, all elements go one by one.
template <class Format>
inline void scale_share(size_t thread, size_t threads, typename Format::Stored* to,
                                            const typename Format::Stored* from, size_t count, const Factor& factor) {
  constexpr size_t width = sizeof(Vector) / sizeof(*from);
  const auto from_at = reinterpret_cast<uintptr_t>(from), to_at = reinterpret_cast<uintptr_t>(to);
  size_t before = count;
  if ((from_at - to_at) % sizeof(Vector) == 0) before = (0 - from_at) % sizeof(Vector) / sizeof(*from);
  if (before > count) before = count;
  const size_t vectors = (count - before) / width, after = before + vectors * width;

  for (size_t i = thread; i < before; i += threads) to[i] = Format::scaled(from[i], factor);
  const auto* in = reinterpret_cast<const Vector*>(from + before);
  auto* out = reinterpret_cast<Vector*>(to + before);
  for (size_t i = thread; i < vectors; i += threads) out[i] = scaled<Format>(in[i], factor);
  for (size_t i = after + thread; i < count; i += threads) to[i] = Format::scaled(from[i], factor);
}

}  // namespace lightcc::scaling
