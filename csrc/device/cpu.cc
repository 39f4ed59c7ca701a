// reduce() and copy() on the CPU: finds the loop in kernels.h for a dtype, an operation and the
// instruction set of this machine. Chosen by asking the CPU at first use, not by ifunc resolvers, which
// run before a sanitizer is ready.
#include <atomic>
#include <string>

#include "base/error.h"
#include "device/cpu.h"
#include "device/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define LIGHTCC_AVX2 [[gnu::target("avx2,f16c")]]
#endif

namespace lightcc {
namespace {

using namespace kernels;
using Kernel = void (*)(const Task&);

template <class Format, class Op>
void run_plain(const Task& task) {
  run<Format, Op>(task);
}

#if defined(__x86_64__)

struct F16c {
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

template <class Format, class Op>
LIGHTCC_AVX2 void run_avx2(const Task& task) {
  run<Format, Op>(task);
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

template <class Format, class Op>
Kernel kernel(Isa isa) {
  return isa == Isa::avx2 ? run_avx2<Format, Op> : run_plain<Format, Op>;
}

#else

using F16c = PlainFloat16;
bool has_avx2() { return false; }
template <class Format, class Op>
Kernel kernel(Isa) {
  return run_plain<Format, Op>;
}

#endif

template <class Format>
Kernel kernel(Isa isa, ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return kernel<Format, Sum>(isa);
    case ReduceOp::min: return kernel<Format, Min>(isa);
    case ReduceOp::max: return kernel<Format, Max>(isa);
    case ReduceOp::product: return kernel<Format, Product>(isa);
    default: throw Error(Code::internal, std::string("reduce: no kernel for ") + name_of(op));
  }
}

Kernel boolean_kernel(Isa isa, ReduceOp op) {
  const bool is_or = op == ReduceOp::sum || op == ReduceOp::max;
  return kernel<Boolean>(isa, is_or ? ReduceOp::max : op == ReduceOp::product ? ReduceOp::min : op);
}

Kernel kernel(Isa isa, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::uint8: return kernel<Number<uint8_t>>(isa, op);
    case DType::int8: return kernel<Number<int8_t>>(isa, op);
    case DType::uint16: return kernel<Number<uint16_t>>(isa, op);
    case DType::int16: return kernel<Number<int16_t>>(isa, op);
    case DType::int32: return kernel<Number<int32_t>>(isa, op);
    case DType::int64: return kernel<Number<int64_t>>(isa, op);
    case DType::float16: return isa == Isa::avx2 ? kernel<Half<F16c>>(isa, op) : kernel<Half<PlainFloat16>>(isa, op);
    case DType::float32: return kernel<Number<float>>(isa, op);
    case DType::float64: return kernel<Number<double>>(isa, op);
    case DType::boolean: return boolean_kernel(isa, op);
    case DType::bfloat16: return kernel<Half<PlainBfloat16>>(isa, op);
  }
  throw Error(Code::internal, "reduce: unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

std::atomic<uint64_t> copied{0};

}  // namespace

Isa best_isa() {
  static const Isa best = has_avx2() ? Isa::avx2 : Isa::plain;
  return best;
}

void reduce_with(Isa isa, const Reduction& reduction, std::span<void* const> out, std::span<const void* const> in,
                 size_t count) {
  if (out.empty() || in.empty()) throw Error(Code::internal, "reduce: needs an input and an output");
  kernel(isa, reduction.dtype, reduction.op)(Task{out, in, count, reduction.pre, reduction.post});
}

void reduce(const Reduction& reduction, std::span<void* const> out, std::span<const void* const> in, size_t count) {
  reduce_with(best_isa(), reduction, out, in, count);
}

void copy(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;  // memcpy may not be given the null pointer that an empty tensor has
  std::memcpy(to, from, bytes);
  copied.fetch_add(bytes, std::memory_order_relaxed);
}

uint64_t copied_bytes() { return copied.load(std::memory_order_relaxed); }

}  // namespace lightcc
