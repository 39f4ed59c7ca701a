// float16 and bfloat16 to float32 and back, one number at a time, in plain C++: what every faster
// conversion must equal bit for bit. Rounding is to nearest, ties to even; a NaN stays a (quiet) NaN.
// NVRTC compiles them for GPUs too, as C++17, which has no std::bit_cast (device/cuda/standard.h).
#pragma once
#include <cstdint>

namespace lightcc {

// Chosen by mask, not by branch, so that a loop over these functions becomes vector code: a compiler that
// honours traps will not itself make floating-point arithmetic unconditional.
inline uint32_t choose(bool first, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return (a & mask) | (b & ~mask);
}

inline float float_of_float16(uint16_t h) {
  const uint32_t magnitude = h & 0x7fffu;
  const uint32_t rebias = (127 - 15) << 23;
  const float tiny = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, tiny);
  const uint32_t normal = (magnitude << 13) + rebias;
  const uint32_t special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? 0x400000u : 0u);
  const uint32_t bits = choose(magnitude < 0x400u, subnormal, choose(magnitude < 0x7c00u, normal, special));
  return __builtin_bit_cast(float, bits | (h & 0x8000u) << 16);
}

inline uint16_t float16_of_float(float f) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, f);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rebias = (127 - 15) << 23;
  // 0.5 has an ulp of 2^-24, the smallest float16: adding it makes the hardware round to just that.
  const uint32_t half = __builtin_bit_cast(uint32_t, 0.5f);
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - half;
  const uint32_t normal = (magnitude - rebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t rounds_to_infinity = 0x477ff000u;  // 65520
  const uint32_t smallest_normal = 0x38800000u;     // 2^-14
  const uint32_t finite = choose(magnitude < smallest_normal, subnormal, normal);
  const uint32_t number = choose(magnitude >= rounds_to_infinity, 0x7c00u, finite);
  const uint32_t rest = choose(magnitude > 0x7f800000u, nan, number);
  return static_cast<uint16_t>(rest | (bits >> 16 & 0x8000u));
}

inline float float_of_bfloat16(uint16_t b) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(b) << 16);
}

inline uint16_t bfloat16_of_float(float f) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, f);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t nan = bits | 0x400000u;
  return static_cast<uint16_t>(choose((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded) >> 16);
}

// As a value that is sent: finite numbers beyond the largest become the largest, never infinity.
constexpr float kLargestFloat16 = 65504;

inline uint16_t send_float16(float x) {
  const float largest = kLargestFloat16;
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), most = __builtin_bit_cast(uint32_t, largest);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const bool beyond = magnitude > most && magnitude < 0x7f800000u;
  return float16_of_float(__builtin_bit_cast(float, choose(beyond, (bits & 0x80000000u) | most, bits)));
}

}  // namespace lightcc
