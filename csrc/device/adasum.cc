// Adasum's kernels. As in kernels.h a vector is taken block by block, brought into its arithmetic type and stays in L1.
// Dot products go into a fixed number of lanes, element i into lane i modulo their number, whatever the width of
// the machine's registers: so their bits are the same everywhere.
#include "device/adasum.h"

#include <string>

#include "base/error.h"
#include "device/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LIGHTCC_AVX2 [[gnu::target("avx2,f16c")]]
#endif

namespace lightcc {
namespace {

using namespace kernels;

constexpr size_t kLanes = 8;
using Lanes = double[kDotProducts][kLanes];

struct PlainLanes {
  template <class T>
  LIGHTCC_INLINE static void add(const T* a, const T* b, size_t n, Lanes& lanes) {
    for (size_t i = 0; i < n; ++i) {
      const double x = a[i], y = b[i];
      lanes[0][i % kLanes] += x * x;
      lanes[1][i % kLanes] += x * y;
      lanes[2][i % kLanes] += y * y;
    }
  }
};

template <class Format, class Adder>
LIGHTCC_INLINE void run_dots(const void* a, const void* b, size_t count, double* sums) {
  using T = typename Format::Computed;
  using Stored = typename Format::Stored;
  constexpr size_t block = kBlockBytes / sizeof(T);
  static_assert(block % kLanes == 0);
  alignas(kLine) T room[2][block];
  alignas(kLine) Lanes lanes = {};
  for (size_t at = 0, n; at < count; at += n) {
    n = std::min(block, count - at);
    const T* x = Format::load(static_cast<const Stored*>(a) + at, n, 1, room[0]);
    const T* y = Format::load(static_cast<const Stored*>(b) + at, n, 1, room[1]);
    Adder::add(x, y, n, lanes);
  }
  for (size_t k = 0; k < kDotProducts; ++k) {
    const double* l = lanes[k];
    sums[k] += ((l[0] + l[4]) + (l[1] + l[5])) + ((l[2] + l[6]) + (l[3] + l[7]));
  }
}

template <class Format>
LIGHTCC_INLINE void run_scaled(const void* a, double by_a, const void* b, double by_b, void* out, size_t count) {
  using T = typename Format::Computed;
  using Stored = typename Format::Stored;
  constexpr size_t block = kBlockBytes / sizeof(T);
  alignas(kLine) T room[2][block];
  const T p = static_cast<T>(by_a), q = static_cast<T>(by_b);
  for (size_t at = 0, n; at < count; at += n) {
    n = std::min(block, count - at);
    const T* x = Format::load(static_cast<const Stored*>(a) + at, n, 1, room[0]);
    const T* y = Format::load(static_cast<const Stored*>(b) + at, n, 1, room[1]);
    Stored* to = static_cast<Stored*>(out) + at;
    T* result = Format::target(to, 1, room[0]);
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) result[i] = p * x[i] + q * y[i];
    Format::store(result, n, 1, to);
  }
}

template <class Format>
void dots_plain(const void* a, const void* b, size_t count, double* sums) {
  run_dots<Format, PlainLanes>(a, b, count, sums);
}
template <class Format>
void scaled_plain(const void* a, double by_a, const void* b, double by_b, void* out, size_t count) {
  run_scaled<Format>(a, by_a, b, by_b, out, count);
}

#if defined(__x86_64__)

// Four lanes a register: the lower and the upper half of them.
struct Avx2Lanes {
  LIGHTCC_AVX2 static void halves(const float* from, __m256d& lower, __m256d& upper) {
    lower = _mm256_cvtps_pd(_mm_loadu_ps(from));
    upper = _mm256_cvtps_pd(_mm_loadu_ps(from + 4));
  }
  LIGHTCC_AVX2 static void halves(const double* from, __m256d& lower, __m256d& upper) {
    lower = _mm256_loadu_pd(from);
    upper = _mm256_loadu_pd(from + 4);
  }
  template <class T>
  LIGHTCC_AVX2 static void add(const T* a, const T* b, size_t n, Lanes& lanes) {
    __m256d sums[kDotProducts][2];
    for (size_t k = 0; k < kDotProducts; ++k)
      for (size_t h = 0; h < 2; ++h) sums[k][h] = _mm256_load_pd(lanes[k] + 4 * h);
    size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      __m256d x[2], y[2];
      halves(a + i, x[0], x[1]);
      halves(b + i, y[0], y[1]);
      for (size_t h = 0; h < 2; ++h) {
        sums[0][h] = _mm256_add_pd(sums[0][h], _mm256_mul_pd(x[h], x[h]));
        sums[1][h] = _mm256_add_pd(sums[1][h], _mm256_mul_pd(x[h], y[h]));
        sums[2][h] = _mm256_add_pd(sums[2][h], _mm256_mul_pd(y[h], y[h]));
      }
    }
    for (size_t k = 0; k < kDotProducts; ++k)
      for (size_t h = 0; h < 2; ++h) _mm256_store_pd(lanes[k] + 4 * h, sums[k][h]);
    PlainLanes::add(a + i, b + i, n - i, lanes);
  }
};

template <class Format>
LIGHTCC_AVX2 void dots_avx2(const void* a, const void* b, size_t count, double* sums) {
  run_dots<Format, Avx2Lanes>(a, b, count, sums);
}
template <class Format>
LIGHTCC_AVX2 void scaled_avx2(const void* a, double by_a, const void* b, double by_b, void* out, size_t count) {
  run_scaled<Format>(a, by_a, b, by_b, out, count);
}

#else

template <class Format>
constexpr auto dots_avx2 = dots_plain<Format>;
template <class Format>
constexpr auto scaled_avx2 = scaled_plain<Format>;

#endif

// Calls body with the format of a dtype.
template <class Body>
void with_format(DType dtype, Body body) {
  switch (dtype) {
    case DType::float16:
      return body(Half<PlainFloat16>{});
    case DType::bfloat16:
      return body(Half<PlainBfloat16>{});
    case DType::float32:
      return body(Number<float>{});
    case DType::float64:
      return body(Number<double>{});
    default:
      throw Error(Code::internal, std::string("Adasum has no kernel for ") + name_of(dtype));
  }
}

}  // namespace

void add_dot_products_with(Isa isa, DType dtype, const void* a, const void* b, size_t count, double* sums) {
  with_format(dtype, [&]<class Format>(Format) {
    (isa == Isa::plain ? dots_plain<Format> : dots_avx2<Format>)(a, b, count, sums);
  });
}

void add_scaled_with(Isa isa, DType dtype, const void* a, double by_a, const void* b, double by_b, void* out,
                     size_t count) {
  with_format(dtype, [&]<class Format>(Format) {
    (isa == Isa::plain ? scaled_plain<Format> : scaled_avx2<Format>)(a, by_a, b, by_b, out, count);
  });
}

void add_dot_products(DType dtype, const void* a, const void* b, size_t count, double* sums) {
  add_dot_products_with(best_isa(), dtype, a, b, count, sums);
}

void add_scaled(DType dtype, const void* a, double by_a, const void* b, double by_b, void* out, size_t count) {
  add_scaled_with(best_isa(), dtype, a, by_a, b, by_b, out, count);
}

}  // namespace lightcc
