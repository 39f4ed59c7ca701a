// Rows on the wire as 16-bit floats. Conversion rounds to nearest, ties to even.
#pragma once
#include <bit>
#include <cstdint>

namespace lightcc::embedding {

__extension__ using Float16 = _Float16;

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) {
    const uint32_t all = std::bit_cast<uint32_t>(value);
    const bool is_nan = (all & 0x7fffffff) > 0x7f800000;
    bits = uint16_t(is_nan ? (all >> 16) | 0x40 : (all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

// Without the processor's own instructions, which are used where there are any, a float16 costs a call each way.
void convert(const float* from, Float16* to, int64_t count);
void convert(const Float16* from, float* to, int64_t count);
template <class From, class To> void convert(const From* from, To* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = To(float(from[i]));
}

}  // namespace lightcc::embedding
