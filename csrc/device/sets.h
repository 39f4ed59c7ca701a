// The instruction sets that reduce() has loops for. A set brings what the compiler does not find by itself, the
// conversion of float16 and the store past the cache, and loop(), the function that run() of kernels.h is inlined
// into. Plain is what every machine of the architecture has; the others must equal it bit for bit.
//
// AVX512_BF16 is not used: its conversion takes subnormal numbers for zero.
#pragma once
#include "device/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LIGHTCC_AVX2 [[gnu::target("avx2,f16c")]]
#define LIGHTCC_AVX512 [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#endif

namespace lightcc::kernels {

struct Plain {
  using Float16 = PlainFloat16;
  using Bfloat16 = PlainBfloat16;
  static bool here() { return true; }
  // Whole lines from anywhere to a line's border, past the cache where there are instructions for it.
  static void stream_lines(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__x86_64__)
    for (size_t i = 0; i < bytes; i += sizeof(__m128i)) {
      const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
    }
#else
    std::memcpy(to, from, bytes);
#endif
  }
  template <class Format, class Op>
  static void loop(const Task& task) {
    run<Plain, Format, Op>(task);
  }
};

#if defined(__x86_64__)

struct Avx2 {
  struct Float16 {
    LIGHTCC_AVX2 static void widen(const uint16_t* from, size_t n, float* to) {
      size_t i = 0;
      for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
      }
      PlainFloat16::widen(from + i, n - i, to + i);
    }
    LIGHTCC_AVX2 static void narrow(const float* from, size_t n, uint16_t* to) {
      size_t i = 0;
      for (; i + 8 <= n; i += 8) {
        const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
      }
      PlainFloat16::narrow(from + i, n - i, to + i);
    }
  };
  struct Bfloat16 {
    LIGHTCC_AVX2 static void widen(const uint16_t* from, size_t n, float* to) {
      size_t i = 0;
      for (; i + 8 <= n; i += 8) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bits);
      }
      PlainBfloat16::widen(from + i, n - i, to + i);
    }
    LIGHTCC_AVX2 static void narrow(const float* from, size_t n, uint16_t* to) {
      size_t i = 0;
      for (; i + 16 <= n; i += 16) {
        const __m256i pairs = _mm256_packus_epi32(rounded(from + i), rounded(from + i + 8));  // in each half its own
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_permute4x64_epi64(pairs, 0xd8));
      }
      PlainBfloat16::narrow(from + i, n - i, to + i);
    }
    LIGHTCC_AVX2 static __m256i rounded(const float* from) {  // as bfloat16_of_float() does it
      const __m256 x = _mm256_loadu_ps(from);
      const __m256i bits = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      const __m256i number = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
      const __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
      const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
      return _mm256_srli_epi32(_mm256_blendv_epi8(number, nan, is_nan), 16);
    }
  };
  static bool here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
  static void stream_lines(std::byte* to, const std::byte* from, size_t bytes) {
    Plain::stream_lines(to, from, bytes);
  }
  template <class Format, class Op>
  LIGHTCC_AVX2 static void loop(const Task& task) {
    run<Avx2, Format, Op>(task);
  }
};

struct Avx512 {
  static constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of some unmasked intrinsics: they begin with no value
  struct Float16 {
    LIGHTCC_AVX512 static void widen(const uint16_t* from, size_t n, float* to) {
      size_t i = 0;
      for (; i + 16 <= n; i += 16) {
        const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(kAll, sixteen));
      }
      PlainFloat16::widen(from + i, n - i, to + i);
    }
    LIGHTCC_AVX512 static void narrow(const float* from, size_t n, uint16_t* to) {
      size_t i = 0;
      for (; i + 16 <= n; i += 16) {
        const __m256i sixteen = _mm512_maskz_cvtps_ph(kAll, _mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), sixteen);
      }
      PlainFloat16::narrow(from + i, n - i, to + i);
    }
  };
  struct Bfloat16 {
    LIGHTCC_AVX512 static void widen(const uint16_t* from, size_t n, float* to) {
      size_t i = 0;
      for (; i + 16 <= n; i += 16) {
        const __m256i sixteen = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m512i bits = _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, sixteen), 16);
        _mm512_storeu_si512(to + i, bits);
      }
      PlainBfloat16::widen(from + i, n - i, to + i);
    }
    LIGHTCC_AVX512 static void narrow(const float* from, size_t n, uint16_t* to) {
      size_t i = 0;
      for (; i + 16 <= n; i += 16) {  // as bfloat16_of_float() does it
        const __m512 x = _mm512_loadu_ps(from + i);
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
        const __m512i number = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i result = _mm512_mask_or_epi32(number, is_nan, bits, _mm512_set1_epi32(0x400000));
        const __m256i sixteen = _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, result, 16));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), sixteen);
      }
      PlainBfloat16::narrow(from + i, n - i, to + i);
    }
  };
  static bool here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
  LIGHTCC_AVX512 static void stream_lines(std::byte* to, const std::byte* from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += sizeof(__m512i)) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
  }
  template <class Format, class Op>
  LIGHTCC_AVX512 static void loop(const Task& task) {
    run<Avx512, Format, Op>(task);
  }
};

// What is streamed is ordered with nothing; this orders it before whatever tells others of it.
inline void fence() { _mm_sfence(); }

#else

inline void fence() {}

#endif

}  // namespace lightcc::kernels
