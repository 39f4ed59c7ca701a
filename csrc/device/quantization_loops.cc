// The loops of quantization_kernels.h: plain C++ that the compiler turns into vector code, inlined into one function
// for each instruction set. Intrinsics would gain nothing: with AVX2 and AVX-512 they wait for memory, divisions
// included.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"
#include "device/quantization_kernels.h"
#include "device/sets.h"

namespace lightcc::kernels {
namespace {

constexpr int32_t kInfinity = 0x7f800000;  // bits
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeastScale = std::numeric_limits<float>::min();
constexpr float kOnes = 0x1.8p+23f;  // its last place is 1: adding it rounds, and the sum's low byte is the integer

// The largest scale whose product with the format's largest integer is finite.
template <class Format> constexpr float kMostScale = 0;
template <> constexpr float kMostScale<Int8> = 0x1.020406p+121f;  // less than the largest float / 127, which rounds up
template <> constexpr float kMostScale<Int4> = 0x1.249248p+125f;

template <class Format> float scale_of(float largest) {
  return largest > 0 ? std::clamp(largest / Format::kLargest, kLeastScale, kMostScale<Format>) : 0;
}

// How the values of a group, a byte each, stand in a message; and back. Int8's are there as they are: to copy them
// once more would take a third of the time.
template <class Format> struct Packing;
template <> struct Packing<Int8> {
  using Values = std::byte*;
  LIGHTCC_INLINE static std::byte* unpacked(Values&, std::byte* packed) { return packed; }
  LIGHTCC_INLINE static const std::byte* unpack(Values&, const std::byte* packed, size_t) { return packed; }
  LIGHTCC_INLINE static void pack(std::byte*, const std::byte*, size_t) {}
};
template <> struct Packing<Int4> {
  struct Values {
    alignas(kLine) std::byte all[Int4::kGroup];
  };
  LIGHTCC_INLINE static std::byte* unpacked(Values& values, std::byte*) { return values.all; }
  LIGHTCC_INLINE static const std::byte* unpack(Values& values, const std::byte* packed, size_t n) {
    const auto extended = [](uint32_t half) { return std::byte(int32_t(half << 28) >> 28); };  // to the sign's bit
#pragma GCC ivdep
    for (size_t i = 0; i < n / 2; ++i) {
      values.all[2 * i] = extended(uint32_t(packed[i]));
      values.all[2 * i + 1] = extended(uint32_t(packed[i]) >> 4);
    }
    if (n % 2) values.all[n - 1] = extended(uint32_t(packed[n / 2]));
    return values.all;
  }
  LIGHTCC_INLINE static void pack(std::byte* packed, const std::byte* values, size_t n) {
#pragma GCC ivdep
    for (size_t i = 0; i < n / 2; ++i) packed[i] = (values[2 * i] & std::byte{15}) | values[2 * i + 1] << 4;
    if (n % 2) packed[n / 2] = values[n - 1] & std::byte{15};
  }
};

// Called with a constant n where the group is whole.
template <class Format> LIGHTCC_INLINE bool encode_group(const QuantizationTask& t, size_t at, size_t n) {
  float* r = t.residual + at;
  float* g = t.gradient + at;
  std::byte* packed = t.values + Format::value_bytes(at);
  typename Packing<Format>::Values room;
  std::byte* values = Packing<Format>::unpacked(room, packed);
  const float prescale = t.prescale;
  alignas(kLine) float sums[Format::kGroup];
  int32_t largest = 0;  // by bits, which are in the order of magnitudes
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const float old = r[i];
    const float sum = old + prescale * g[i];
    g[i] = old;
    sums[i] = sum;
    largest = std::max(largest, std::bit_cast<int32_t>(sum) & 0x7fffffff);
  }
  const bool finite = largest < kInfinity;
  const float scale = finite ? scale_of<Format>(std::bit_cast<float>(largest)) : kNaN;
  std::memcpy(t.scales + at / Format::kGroup * sizeof scale, &scale, sizeof scale);
  if (!finite) {
    std::memset(packed, 0, Format::value_bytes(n));
    return false;
  }
  const float by = scale > 0 ? scale : 1;
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const float shifted = sums[i] / by + kOnes;
    values[i] = static_cast<std::byte>(std::bit_cast<uint32_t>(shifted));
    r[i] = sums[i] - (shifted - kOnes) * scale;
  }
  Packing<Format>::pack(packed, values, n);
  return true;
}

template <class Format> LIGHTCC_INLINE bool encode(const QuantizationTask& t) {
  bool finite = true;
  size_t at = 0;
  for (; at + Format::kGroup <= t.count; at += Format::kGroup) finite &= encode_group<Format>(t, at, Format::kGroup);
  if (at < t.count) finite &= encode_group<Format>(t, at, t.count - at);
  return finite;
}

template <class Format>
LIGHTCC_INLINE void add_group(float* out, size_t n, float scale, const std::byte* packed) {
  typename Packing<Format>::Values room;
  const std::byte* values = Packing<Format>::unpack(room, packed, n);
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) out[i] += static_cast<float>(static_cast<int8_t>(values[i])) * scale;
}

template <class Format>
LIGHTCC_INLINE void add(float* out, size_t count, const std::byte* scales, const std::byte* packed) {
  for (size_t at = 0; at < count; at += Format::kGroup, scales += sizeof(float)) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    const std::byte* from = packed + Format::value_bytes(at);
    if (at + Format::kGroup <= count) add_group<Format>(out + at, Format::kGroup, scale, from);
    else add_group<Format>(out + at, count - at, scale, from);
  }
}

template <class Format> bool encode_plain(const QuantizationTask& t) { return encode<Format>(t); }
template <class Format>
void add_plain(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  add<Format>(out, count, scales, values);
}
template <class Format> constexpr QuantizationLoops kPlain{encode_plain<Format>, add_plain<Format>};

#if defined(__x86_64__)

template <class Format> LIGHTCC_AVX2 bool encode_avx2(const QuantizationTask& t) { return encode<Format>(t); }
template <class Format>
LIGHTCC_AVX2 void add_avx2(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  add<Format>(out, count, scales, values);
}
template <class Format> constexpr QuantizationLoops kAvx2{encode_avx2<Format>, add_avx2<Format>};

template <class Format> LIGHTCC_AVX512 bool encode_avx512(const QuantizationTask& t) { return encode<Format>(t); }
template <class Format>
LIGHTCC_AVX512 void add_avx512(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  add<Format>(out, count, scales, values);
}
template <class Format> constexpr QuantizationLoops kAvx512{encode_avx512<Format>, add_avx512<Format>};

#endif

}  // namespace

template <class Format> const QuantizationLoops& quantization_loops(Isa isa) {
  if (!has(isa)) throw Error(Code::internal, std::string(Format::kName) + ": this machine has no " + name_of(isa));
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kAvx512<Format>;
  if (isa == Isa::avx2) return kAvx2<Format>;
#endif
  return kPlain<Format>;
}
template const QuantizationLoops& quantization_loops<Int8>(Isa);
template const QuantizationLoops& quantization_loops<Int4>(Isa);

}  // namespace lightcc::kernels
