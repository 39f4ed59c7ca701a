// The loops behind TopKSelection, as in kernels.h: plain C++ that is inlined into one function per instruction set, and
// what AVX-512 brings beyond that, compressing a register. All give the same bits.
#pragma once
#include <bit>

#include "device/sets.h"
#include "device/topk.h"
#include "device/topk_message.h"

namespace lightcc::kernels {

inline constexpr size_t kLanes = 16;  // loops that compress write whole registers: so much room beyond the last

LIGHTCC_INLINE uint32_t magnitude_of(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffu; }

// A block of a piece: adds up, unless there is no gradient because the residual is the sum already, and makes
// candidates of the elements whose bits are at least `least`.
struct CollectTask {
  float* residual;
  float* gradient;  // becomes the old residual
  float scale;
  size_t count;
  uint32_t least;
  float* values;  // candidates go here, room for count + kLanes
  uint16_t* indices;
};

// The candidates of a block, in place: keeps those from cut on and the first `ties` of those just below, puts the
// others back into the residual.
struct PruneTask {
  float* residual;
  const float* values;
  const uint16_t* indices;
  size_t count;
  uint32_t cut;
  float* kept_values;  // at values or before
  uint16_t* kept_indices;
};

// The loops of one instruction set.
struct TopKLoops {
  size_t (*collect[2][2])(const CollectTask&);  // [values are float16][adds up]; returns how many were found
  size_t (*count_from)(const float* values, size_t n, uint32_t least);
  size_t (*prune)(const PruneTask&, size_t& ties);  // returns how many are kept, takes ties off
};
const TopKLoops& topk_loops(Isa);

template <bool half>
LIGHTCC_INLINE float left_behind(float sum) {
  if constexpr (half) return sum - float_of_float16(send_float16(sum));
  else return 0;
}

struct PlainTopK {
  static constexpr size_t kGroup = 32;

  // Most groups have no candidate, and no branch is taken for an element of them.
  template <bool half, bool add>
  LIGHTCC_INLINE static size_t collect_group(const CollectTask& t, size_t at, size_t n, size_t found) {
    float* r = t.residual + at;
    float* g = t.gradient + at;
    uint32_t any = 0;
    if constexpr (add) {
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) {
        const float old = r[i];
        const float sum = old + t.scale * g[i];
        g[i] = old;
        r[i] = sum;
        any |= static_cast<uint32_t>(magnitude_of(sum) >= t.least);
      }
    } else {
      for (size_t i = 0; i < n; ++i) any |= static_cast<uint32_t>(magnitude_of(r[i]) >= t.least);
    }
    if (!any) return found;
    for (size_t i = 0; i < n; ++i) {
      if (magnitude_of(r[i]) < t.least) continue;
      t.values[found] = r[i];
      t.indices[found++] = static_cast<uint16_t>(at + i);
      r[i] = left_behind<half>(r[i]);
    }
    return found;
  }

  template <bool half, bool add>
  LIGHTCC_INLINE static size_t collect(const CollectTask& t) {
    size_t found = 0, at = 0;
    for (; at + kGroup <= t.count; at += kGroup) found = collect_group<half, add>(t, at, kGroup, found);
    return collect_group<half, add>(t, at, t.count - at, found);
  }

  LIGHTCC_INLINE static size_t count_from(const float* values, size_t n, uint32_t least) {
    uint32_t count = 0;
    for (size_t i = 0; i < n; ++i) count += magnitude_of(values[i]) >= least;
    return count;
  }

  // Which are kept is as good as random, so no branch depends on it.
  LIGHTCC_INLINE static size_t prune(const PruneTask& t, size_t& ties) {
    size_t kept = 0;
    float nowhere;
    for (size_t i = 0; i < t.count; ++i) {
      const float value = t.values[i];
      const uint16_t index = t.indices[i];
      const uint32_t magnitude = magnitude_of(value);
      const bool tie = (magnitude + 1 == t.cut) & (ties > 0);
      const bool keep = tie | (magnitude >= t.cut);
      ties -= tie;
      t.kept_values[kept] = value;
      t.kept_indices[kept] = index;
      kept += keep;
      *(keep ? &nowhere : t.residual + index) = value;
    }
    return kept;
  }
};

#if defined(__x86_64__)

struct Avx2TopK {
  static constexpr size_t kGroup = 32;

  // The lanes of 8 sums that are candidates, as bits.
  template <bool add>
  LIGHTCC_AVX2 static uint32_t eight(float* r, float* g, __m256 scale, __m256i below) {
    const __m256 old = _mm256_loadu_ps(r);
    __m256 sum = old;
    if constexpr (add) {
      sum = _mm256_add_ps(old, _mm256_mul_ps(scale, _mm256_loadu_ps(g)));
      _mm256_storeu_ps(g, old);
      _mm256_storeu_ps(r, sum);
    }
    const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(sum), _mm256_set1_epi32(0x7fffffff));
    const __m256i found = _mm256_cmpgt_epi32(magnitude, below);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(found)));
  }

  template <bool half, bool add>
  LIGHTCC_AVX2 static size_t collect(const CollectTask& t) {
    const __m256 scale = _mm256_set1_ps(t.scale);
    const __m256i below = _mm256_set1_epi32(static_cast<int32_t>(t.least - 1));  // signed: -1 for 0, as it must be
    size_t found = 0, at = 0;
    for (; at + kGroup <= t.count; at += kGroup) {
      float* r = t.residual + at;
      float* g = t.gradient + at;
      uint32_t lanes = eight<add>(r, g, scale, below);
      lanes |= eight<add>(r + 8, g + 8, scale, below) << 8;
      lanes |= eight<add>(r + 16, g + 16, scale, below) << 16;
      lanes |= eight<add>(r + 24, g + 24, scale, below) << 24;
      for (; lanes; lanes &= lanes - 1, ++found) {
        const auto i = static_cast<size_t>(__builtin_ctz(lanes));
        t.values[found] = r[i];
        t.indices[found] = static_cast<uint16_t>(at + i);
        r[i] = left_behind<half>(r[i]);
      }
    }
    return PlainTopK::collect_group<half, add>(t, at, t.count - at, found);
  }
};

struct Avx512TopK {
  static constexpr __mmask16 kAll = 0xffff;
  static constexpr size_t kGroup = 4 * kLanes;
  static constexpr size_t kAhead = 128;  // candidates of which prune() fetches the lines that it will change

  LIGHTCC_AVX512 static __m512i magnitudes(__m512 x) {
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  }

  template <bool half>
  LIGHTCC_AVX512 static __m512 left_behind(__m512 sum) {  // as above, and send_float16() inside it
    if constexpr (!half) return _mm512_setzero_ps();
    constexpr int kRound = _MM_FROUND_TO_NEAREST_INT;
    const __m512i most = _mm512_set1_epi32(std::bit_cast<int32_t>(kLargestFloat16));
    const __m512i infinity = _mm512_set1_epi32(0x7f800000);
    const __m512i magnitude = magnitudes(sum);
    const __mmask16 beyond = _mm512_cmplt_epu32_mask(magnitude, infinity) & _mm512_cmpgt_epu32_mask(magnitude, most);
    const __m512i sign = _mm512_xor_si512(_mm512_castps_si512(sum), magnitude);
    const __m512 sent = _mm512_castsi512_ps(_mm512_mask_or_epi32(_mm512_castps_si512(sum), beyond, sign, most));
    return _mm512_sub_ps(sum, _mm512_maskz_cvtph_ps(kAll, _mm512_maskz_cvtps_ph(kAll, sent, kRound)));
  }

  // The lanes of 16 sums that are candidates; they stand in the residual.
  template <bool add>
  LIGHTCC_AVX512 static __mmask16 sixteen(float* r, float* g, __m512 scale, __m512i least) {
    const __m512 old = _mm512_loadu_ps(r);
    __m512 sum = old;
    if constexpr (add) {
      sum = _mm512_add_ps(old, _mm512_mul_ps(scale, _mm512_loadu_ps(g)));
      _mm512_storeu_ps(g, old);
      _mm512_storeu_ps(r, sum);
    }
    return _mm512_cmpge_epu32_mask(magnitudes(sum), least);
  }

  template <bool half, bool add>
  LIGHTCC_AVX512 static size_t collect(const CollectTask& t) {
    const __m512 scale = _mm512_set1_ps(t.scale);
    const __m512i least = _mm512_set1_epi32(static_cast<int32_t>(t.least));
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    size_t found = 0, at = 0;
    for (; at + kGroup <= t.count; at += kGroup) {
      float* r = t.residual + at;
      float* g = t.gradient + at;
      __mmask16 mask[kGroup / kLanes];
      for (size_t i = 0; i < kGroup / kLanes; ++i) {
        mask[i] = sixteen<add>(r + i * kLanes, g + i * kLanes, scale, least);
      }
      for (size_t i = 0; i < kGroup / kLanes; ++i) {
        if (!mask[i]) continue;
        const __m512 sum = _mm512_loadu_ps(r + i * kLanes);
        _mm512_storeu_ps(r + i * kLanes, _mm512_mask_mov_ps(sum, mask[i], left_behind<half>(sum)));
        const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(at + i * kLanes)));
        _mm512_storeu_ps(t.values + found, _mm512_maskz_compress_ps(mask[i], sum));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(t.indices + found),
                            _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_compress_epi32(mask[i], index)));
        found += static_cast<size_t>(__builtin_popcount(mask[i]));
      }
    }
    return PlainTopK::collect_group<half, add>(t, at, t.count - at, found);
  }

  LIGHTCC_AVX512 static size_t prune(const PruneTask& t, size_t& ties) {
    const __m512i cut = _mm512_set1_epi32(static_cast<int32_t>(t.cut));
    const __m512i below = _mm512_set1_epi32(static_cast<int32_t>(t.cut - 1));
    size_t kept = 0;
    for (size_t at = 0; at < t.count; at += kLanes) {
      const size_t left = t.count - at;
      const __mmask16 here = left >= kLanes ? kAll : static_cast<__mmask16>((1u << left) - 1);
      const __m512 value = _mm512_maskz_loadu_ps(here, t.values + at);
      const __m256i index = _mm256_maskz_loadu_epi16(here, t.indices + at);
      __mmask16 keep = _mm512_mask_cmpge_epu32_mask(here, magnitudes(value), cut);
      if (ties > 0) {
        uint32_t equal = _mm512_mask_cmpeq_epi32_mask(here, magnitudes(value), below);
        for (; equal && ties > 0; equal &= equal - 1, --ties) keep |= static_cast<__mmask16>(equal & -equal);
      }
      if (left >= kAhead + kLanes) {
        const __m512 later = _mm512_loadu_ps(t.values + at + kAhead);
        for (uint32_t rest = _mm512_cmplt_epu32_mask(magnitudes(later), cut); rest; rest &= rest - 1) {
          __builtin_prefetch(t.residual + t.indices[at + kAhead + static_cast<size_t>(__builtin_ctz(rest))], 1);
        }
      }
      for (uint32_t rest = here & ~keep & 0xffffu; rest; rest &= rest - 1) {  // before kept ones may overwrite them
        const size_t i = at + static_cast<size_t>(__builtin_ctz(rest));
        t.residual[t.indices[i]] = t.values[i];
      }
      const auto n = static_cast<size_t>(__builtin_popcount(keep));
      const auto first_n = static_cast<__mmask16>((1u << n) - 1);  // behind them candidates wait to be read
      _mm512_mask_storeu_ps(t.kept_values + kept, first_n, _mm512_maskz_compress_ps(keep, value));
      const __m512i packed = _mm512_maskz_compress_epi32(keep, _mm512_maskz_cvtepu16_epi32(kAll, index));
      _mm256_mask_storeu_epi16(t.kept_indices + kept, first_n, _mm512_maskz_cvtepi32_epi16(kAll, packed));
      kept += n;
    }
    return kept;
  }
};

#endif

}  // namespace lightcc::kernels
