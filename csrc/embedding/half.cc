#include "embedding/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lightcc::embedding {
namespace {

#if defined(__x86_64__)
bool has_instructions() {
  static const bool has = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx");
  return has;
}

// They convert all whole eights and say how many numbers that are.
[[gnu::target("avx,f16c")]] int64_t convert_eights(const float* from, Float16* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
[[gnu::target("avx,f16c")]] int64_t convert_eights(const Float16* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  return i;
}
#else
bool has_instructions() { return false; }
template <class From, class To> int64_t convert_eights(const From*, To*, int64_t) { return 0; }
#endif

template <class From, class To> void convert_all(const From* from, To* to, int64_t count) {
  int64_t i = has_instructions() ? convert_eights(from, to, count) : 0;
  for (; i < count; ++i) to[i] = To(float(from[i]));
}

}  // namespace

void convert(const float* from, Float16* to, int64_t count) { convert_all(from, to, count); }
void convert(const Float16* from, float* to, int64_t count) { convert_all(from, to, count); }

}  // namespace lightcc::embedding
