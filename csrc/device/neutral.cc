// fill_neutral(): what a rank without data puts into a reduction.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "device/device.h"
#include "device/half.h"

namespace lightcc {
namespace {

template <class T>
T last(bool greatest) {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity) return greatest ? Limits::infinity() : -Limits::infinity();
  return greatest ? Limits::max() : Limits::lowest();
}

// The neutral number in T's own arithmetic. The factor is applied before the comparison: a negative one turns the order
// around, and one of 0 makes all inputs 0, but infinity would become NaN.
template <class T>
T neutral(const Reduction& r) {
  switch (r.op) {
    case ReduceOp::product: return T(1);
    case ReduceOp::min:
    case ReduceOp::max: return r.pre == 0 ? T(0) : last<T>((r.op == ReduceOp::min) == (r.pre > 0));
    default: return T(0);
  }
}

template <class T>
void fill(T value, void* out, size_t count) {
  std::fill_n(static_cast<T*>(out), count, value);
}

}  // namespace

void fill_neutral(const Reduction& r, void* out, size_t count) {
  switch (r.dtype) {
    case DType::uint8: return fill(neutral<uint8_t>(r), out, count);
    case DType::int8: return fill(neutral<int8_t>(r), out, count);
    case DType::uint16: return fill(neutral<uint16_t>(r), out, count);
    case DType::int16: return fill(neutral<int16_t>(r), out, count);
    case DType::int32: return fill(neutral<int32_t>(r), out, count);
    case DType::int64: return fill(neutral<int64_t>(r), out, count);
    case DType::float16: return fill(float16_of_float(neutral<float>(r)), out, count);
    case DType::float32: return fill(neutral<float>(r), out, count);
    case DType::float64: return fill(neutral<double>(r), out, count);
    case DType::bfloat16: return fill(bfloat16_of_float(neutral<float>(r)), out, count);
    case DType::uint32: return fill(neutral<uint32_t>(r), out, count);
    case DType::uint64: return fill(neutral<uint64_t>(r), out, count);
    case DType::boolean:  // sum and max are "or", product and min "and"; factors do not apply
      return fill(uint8_t(r.op == ReduceOp::product || r.op == ReduceOp::min), out, count);
  }
}

}  // namespace lightcc
