// reduce() and copy() on the CPU: finds the loop for a dtype, an operation and the instruction set of this
// machine. Chosen by asking the CPU at first use, not by ifunc resolvers, which run before a sanitizer is ready.
#include "device/cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "base/error.h"
#include "device/sets.h"

namespace lightcc {
namespace {

using namespace kernels;
using Kernel = void (*)(const Task&);

template <class Set, class Format>
Kernel kernel(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum: return Set::template loop<Format, Sum>;
    case ReduceOp::min: return Set::template loop<Format, Min>;
    case ReduceOp::max: return Set::template loop<Format, Max>;
    case ReduceOp::product: return Set::template loop<Format, Product>;
    default: throw Error(Code::internal, std::string("reduce: no kernel for ") + name_of(op));
  }
}

template <class Set>
Kernel boolean_kernel(ReduceOp op) {
  const bool is_or = op == ReduceOp::sum || op == ReduceOp::max;
  return kernel<Set, Boolean>(is_or ? ReduceOp::max : op == ReduceOp::product ? ReduceOp::min : op);
}

template <class Set>
Kernel kernel(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::uint8: return kernel<Set, Number<uint8_t>>(op);
    case DType::int8: return kernel<Set, Number<int8_t>>(op);
    case DType::uint16: return kernel<Set, Number<uint16_t>>(op);
    case DType::int16: return kernel<Set, Number<int16_t>>(op);
    case DType::int32: return kernel<Set, Number<int32_t>>(op);
    case DType::int64: return kernel<Set, Number<int64_t>>(op);
    case DType::float16: return kernel<Set, Half<typename Set::Float16>>(op);
    case DType::float32: return kernel<Set, Number<float>>(op);
    case DType::float64: return kernel<Set, Number<double>>(op);
    case DType::boolean: return boolean_kernel<Set>(op);
    case DType::bfloat16: return kernel<Set, Half<typename Set::Bfloat16>>(op);
    case DType::uint32: return kernel<Set, Number<uint32_t>>(op);
    case DType::uint64: return kernel<Set, Number<uint64_t>>(op);
  }
  throw Error(Code::internal, "reduce: unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

Kernel kernel(Isa isa, DType dtype, ReduceOp op) {
  if (!has(isa)) throw Error(Code::internal, std::string("reduce: this machine has no ") + name_of(isa));
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kernel<Avx512>(dtype, op);
  if (isa == Isa::avx2) return kernel<Avx2>(dtype, op);
#endif
  return kernel<Plain>(dtype, op);
}

// A virtual machine is told of the whole cache of its host, which it shares. Of the 480 MiB that one with two cores
// was told of, data began to fall out at about 128.
constexpr size_t kMostCache = size_t(128) << 20;

std::atomic<uint64_t> copied{0}, staged{0};

void move(void* to, const void* from, size_t bytes, bool streamed) {
  if (bytes == 0) return;  // memcpy may not be given the null pointer that an empty tensor has
  if (streamed) stream<Plain>(to, from, bytes), fence();
  else std::memcpy(to, from, bytes);
}

}  // namespace

bool has(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return Avx512::here();
  if (isa == Isa::avx2) return Avx2::here();
#endif
  return isa == Isa::plain;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::plain: return "plain";
    case Isa::avx2: return "AVX2";
    case Isa::avx512: return "AVX-512";
  }
  return "unknown instruction set";
}

Isa best_isa() {
  static const Isa best = has(Isa::avx512) ? Isa::avx512 : has(Isa::avx2) ? Isa::avx2 : Isa::plain;
  return best;
}

void reduce_with(Isa isa, const Reduction& reduction, std::span<void* const> out, std::span<const void* const> in,
                 size_t count, size_t streamed) {
  if (out.empty() || in.empty()) throw Error(Code::internal, "reduce: needs an input and an output");
  kernel(isa, reduction.dtype, reduction.op)(Task{out, in, count, reduction.pre, reduction.post, streamed});
  if (streamed) fence();
}

void reduce(const Reduction& reduction, std::span<void* const> out, std::span<const void* const> in, size_t count,
            size_t streamed) {
  reduce_with(best_isa(), reduction, out, in, count, streamed);
}

void copy(void* to, const void* from, size_t bytes, bool streamed) {
  move(to, from, bytes, streamed);
  copied.fetch_add(bytes, std::memory_order_relaxed);
}

void stage(void* to, const void* from, size_t bytes, bool streamed) {
  move(to, from, bytes, streamed);
  count_staged(bytes);
}

void count_staged(size_t bytes) { staged.fetch_add(bytes, std::memory_order_relaxed); }

bool outgrows_cache(size_t bytes) {
  static const size_t counted = [] {
    const long told = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1: not known
    return told > 0 ? std::min(static_cast<size_t>(told), kMostCache) : kMostCache;
  }();
  return bytes >= counted / 2;
}

uint64_t copied_bytes() { return copied.load(std::memory_order_relaxed); }
uint64_t staged_bytes() { return staged.load(std::memory_order_relaxed); }

}  // namespace lightcc
