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

}  // namespace lightcc::embedding
