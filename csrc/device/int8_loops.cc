// The loops of int8_kernels.h: plain C++ that the compiler turns into vector code, inlined into one function for each
// instruction set. Intrinsics would gain nothing: with AVX2 and AVX-512 they wait for memory, divisions included.
#include <bit>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"
#include "device/int8_kernels.h"
#include "device/sets.h"

namespace lightcc::kernels {
namespace {

constexpr int32_t kInfinity = 0x7f800000;  // bits
constexpr float kLeastScale = std::numeric_limits<float>::min();
constexpr float kMostScale = 0x1.020406p+121f;  // the next number, 127 times, is infinity; the largest / 127 is that
constexpr float kOnes = 0x1.8p+23f;  // its last place is 1: adding it rounds, and the sum's low byte is the integer

float scale_of(float largest) { return largest > 0 ? std::clamp(largest / 127, kLeastScale, kMostScale) : 0; }

// Called with a constant n where the group is whole.
LIGHTCC_INLINE bool encode_group(const Int8Task& t, size_t at, size_t n) {
  float* r = t.residual + at;
  float* g = t.gradient + at;
  std::byte* values = t.values + at;
  const float prescale = t.prescale;
  alignas(kLine) float sums[kInt8Group];
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
  const float scale = finite ? scale_of(std::bit_cast<float>(largest)) : std::numeric_limits<float>::quiet_NaN();
  std::memcpy(t.scales + at / kInt8Group * sizeof scale, &scale, sizeof scale);
  if (!finite) {
    std::memset(values, 0, n);
    return false;
  }
  const float by = scale > 0 ? scale : 1;
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    const float shifted = sums[i] / by + kOnes;
    values[i] = static_cast<std::byte>(std::bit_cast<uint32_t>(shifted));
    r[i] = sums[i] - (shifted - kOnes) * scale;
  }
  return true;
}

LIGHTCC_INLINE bool encode(const Int8Task& t) {
  bool finite = true;
  size_t at = 0;
  for (; at + kInt8Group <= t.count; at += kInt8Group) finite &= encode_group(t, at, kInt8Group);
  if (at < t.count) finite &= encode_group(t, at, t.count - at);
  return finite;
}

LIGHTCC_INLINE void add_group(float* out, size_t n, float scale, const std::byte* values) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) out[i] += static_cast<float>(static_cast<int8_t>(values[i])) * scale;
}

LIGHTCC_INLINE void add(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  for (size_t at = 0; at < count; at += kInt8Group, scales += sizeof(float)) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    if (at + kInt8Group <= count) add_group(out + at, kInt8Group, scale, values + at);
    else add_group(out + at, count - at, scale, values + at);
  }
}

bool encode_plain(const Int8Task& t) { return encode(t); }
void add_plain(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  add(out, count, scales, values);
}
constexpr Int8Loops kPlain{encode_plain, add_plain};

#if defined(__x86_64__)

LIGHTCC_AVX2 bool encode_avx2(const Int8Task& t) { return encode(t); }
LIGHTCC_AVX2 void add_avx2(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  add(out, count, scales, values);
}
constexpr Int8Loops kAvx2{encode_avx2, add_avx2};

LIGHTCC_AVX512 bool encode_avx512(const Int8Task& t) { return encode(t); }
LIGHTCC_AVX512 void add_avx512(float* out, size_t count, const std::byte* scales, const std::byte* values) {
  add(out, count, scales, values);
}
constexpr Int8Loops kAvx512{encode_avx512, add_avx512};

#endif

}  // namespace

const Int8Loops& int8_loops(Isa isa) {
  if (!has(isa)) throw Error(Code::internal, std::string("int8: this machine has no ") + name_of(isa));
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kAvx512;
  if (isa == Isa::avx2) return kAvx2;
#endif
  return kPlain;
}

}  // namespace lightcc::kernels
