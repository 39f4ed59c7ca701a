// The loops behind reduce(): plain C++ that the compiler turns into vector code, inlined into one function
// per instruction set (cpu.cc). A reduction runs block by block: the inputs of a block are brought
// into their arithmetic type (in place if they already are), combined up to four at a time, and the
// result is stored. Whatever has to be kept between these passes lies on the stack and stays in L1.
#pragma once
#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "device/device.h"
#include "device/half.h"

#define LIGHTCC_INLINE [[gnu::always_inline]] inline

namespace lightcc::kernels {

struct Task {
  std::span<void* const> out;
  std::span<const void* const> in;
  size_t count;
  double pre, post;
  size_t streamed;  // so many outputs, the first, are written past the cache
};

// ---- operations ---------------------------------------------------------------------------------

// Integers wrap around, as unsigned numbers of at least 32 bits do: narrower ones would be promoted to
// int, whose overflow is undefined.
template <class T>
using Wrapping = std::make_unsigned_t<std::conditional_t<sizeof(T) < 4, int32_t, T>>;

struct Sum {
  template <class T>
  LIGHTCC_INLINE static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a + b;
    else return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};
struct Product {
  template <class T>
  LIGHTCC_INLINE static T of(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a * b;
    else return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
};
// A NaN on either side wins: a diverged rank must not be hidden by a healthy one.
struct Min {
  template <class T>
  LIGHTCC_INLINE static T of(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Max {
  template <class T>
  LIGHTCC_INLINE static T of(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};

// ---- factors ------------------------------------------------------------------------------------

// Towards zero; what does not fit becomes the nearest number that does, NaN becomes 0.
template <class T>
LIGHTCC_INLINE T truncated(double x) {
  constexpr double low = static_cast<double>(std::numeric_limits<T>::min());
  constexpr double high = static_cast<double>(std::numeric_limits<T>::max());  // int64: rounds up to 2^63
  if (x != x) return 0;
  if (x <= low) return std::numeric_limits<T>::min();
  if (x >= high) return std::numeric_limits<T>::max();
  return static_cast<T>(x);
}

template <class T>
LIGHTCC_INLINE void scale(const T* from, size_t n, double factor, T* to) {
  if constexpr (std::is_floating_point_v<T>) {
    const T by = static_cast<T>(factor);
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) to[i] = from[i] * by;
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) to[i] = truncated<T>(static_cast<double>(from[i]) * factor);
  }
}

// ---- formats: how elements are stored, and the numbers they are computed with --------------------------
// load    gives the numbers of n elements: in place, or converted into `room`
// target  where to compute the result: the output itself if nothing is left to do, else `room`
// store   brings the result from target() into the output

template <class T>
struct Number {
  using Stored = T;
  using Computed = T;
  LIGHTCC_INLINE static const T* load(const T* in, size_t n, double pre, T* room) {
    if (pre == 1) return in;
    scale(in, n, pre, room);
    return room;
  }
  LIGHTCC_INLINE static T* target(T* out, double post, T* room) { return post == 1 ? out : room; }
  LIGHTCC_INLINE static void store(T* result, size_t n, double post, T* out) {
    if (result != out) scale(result, n, post, out);
  }
};

struct PlainFloat16 {
  LIGHTCC_INLINE static void widen(const uint16_t* from, size_t n, float* to) {
    for (size_t i = 0; i < n; ++i) to[i] = float_of_float16(from[i]);
  }
  LIGHTCC_INLINE static void narrow(const float* from, size_t n, uint16_t* to) {
    for (size_t i = 0; i < n; ++i) to[i] = float16_of_float(from[i]);
  }
};
struct PlainBfloat16 {
  LIGHTCC_INLINE static void widen(const uint16_t* from, size_t n, float* to) {
    for (size_t i = 0; i < n; ++i) to[i] = float_of_bfloat16(from[i]);
  }
  LIGHTCC_INLINE static void narrow(const float* from, size_t n, uint16_t* to) {
    for (size_t i = 0; i < n; ++i) to[i] = bfloat16_of_float(from[i]);
  }
};

template <class Conversion>
struct Half {
  using Stored = uint16_t;
  using Computed = float;
  LIGHTCC_INLINE static const float* load(const uint16_t* in, size_t n, double pre, float* room) {
    Conversion::widen(in, n, room);
    if (pre != 1) scale(room, n, pre, room);
    return room;
  }
  LIGHTCC_INLINE static float* target(uint16_t*, double, float* room) { return room; }
  LIGHTCC_INLINE static void store(float* result, size_t n, double post, uint16_t* out) {
    if (post != 1) scale(result, n, post, result);
    Conversion::narrow(result, n, out);
  }
};

// Any byte but 0 is true; what comes out is 0 or 1. Or is then the maximum and and the minimum.
struct Boolean {
  using Stored = uint8_t;
  using Computed = uint8_t;
  LIGHTCC_INLINE static const uint8_t* load(const uint8_t* in, size_t n, double, uint8_t* room) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) room[i] = in[i] != 0;
    return room;
  }
  LIGHTCC_INLINE static uint8_t* target(uint8_t* out, double, uint8_t*) { return out; }
  LIGHTCC_INLINE static void store(uint8_t*, size_t, double, uint8_t*) {}
};

// ---- the reduction ------------------------------------------------------------------------------

inline constexpr size_t kTogether = 4;          // inputs combined in one pass
inline constexpr size_t kBlockBytes = 4 << 10;  // of one input in its arithmetic type: all of a pass fits L1
inline constexpr size_t kAheadBytes = 1 << 10;  // how far ahead of a block inputs are fetched
inline constexpr size_t kFetchFrom = 64 << 10;  // smaller inputs are in L1 or L2 as a rule: fetching would only cost

LIGHTCC_INLINE void fetch(const void* from, size_t bytes) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(from) + kAheadBytes;  // may lie beyond the input: no harm
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
}

// Brings bytes to anywhere past the cache; the ends that fill no line go through it.
template <class Set>
LIGHTCC_INLINE void stream(void* to, const void* from, size_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  auto* in = static_cast<const std::byte*>(from);
  const size_t before = std::min(bytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
  const size_t whole = (bytes - before) / kLine * kLine, after = bytes - before - whole;
  if (before) std::memcpy(out, in, before);
  Set::stream_lines(out + before, in + before, whole);
  if (after) std::memcpy(out + before + whole, in + before + whole, after);
}

// ivdep: an output may be an input, but element i depends on no other element, so vectors are safe.
template <class Op, class T>
LIGHTCC_INLINE void combine(T* to, const T* const* in, size_t inputs, size_t n) {
  const T *a = in[0], *b = in[1], *c = in[2], *d = in[3];
  switch (inputs) {
    case 1:
      if (to != a) std::memcpy(to, a, n * sizeof(T));
      break;
    case 2:
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) to[i] = Op::of(a[i], b[i]);
      break;
    case 3:
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) to[i] = Op::of(Op::of(a[i], b[i]), c[i]);
      break;
    default:
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) to[i] = Op::of(Op::of(Op::of(a[i], b[i]), c[i]), d[i]);
  }
}

// All inputs into as many outputs in one pass, as where few ranks add up in memory that all of them see: to read a
// result again in order to copy it would cost as much as the sum.
template <class Op, size_t ranks, class T>
LIGHTCC_INLINE void combine_for_all(const Task& task) {
  const T* in[ranks];
  T* out[ranks];
  for (size_t k = 0; k < ranks; ++k) in[k] = static_cast<const T*>(task.in[k]), out[k] = static_cast<T*>(task.out[k]);
#pragma GCC ivdep
  for (size_t i = 0; i < task.count; ++i) {
    T result = in[0][i];
    for (size_t k = 1; k < ranks; ++k) result = Op::of(result, in[k][i]);
    for (size_t k = 0; k < ranks; ++k) out[k][i] = result;
  }
}

// An output is written only after every input of the block has been read, since it may be one of them.
template <class Set, class Format, class Op>
LIGHTCC_INLINE void run(const Task& task) {
  using T = typename Format::Computed;
  if constexpr (std::is_same_v<Format, Number<T>>)
    if (task.in.size() == task.out.size() && task.pre == 1 && task.post == 1 && task.streamed == 0) {
      if (task.in.size() == 2) return combine_for_all<Op, 2, T>(task);
      if (task.in.size() == 4) return combine_for_all<Op, 4, T>(task);
    }
  using Stored = typename Format::Stored;
  constexpr size_t block = kBlockBytes / sizeof(T);
  alignas(kLine) T room[kTogether][block];
  alignas(kLine) Stored streamed[block];
  const bool far = task.count * sizeof(Stored) >= kFetchFrom;
  for (size_t at = 0, n; at < task.count; at += n) {
    n = std::min(block, task.count - at);
    Stored* out = task.streamed ? streamed : static_cast<Stored*>(task.out[0]) + at;
    T* result = Format::target(out, task.post, room[0]);
    const T* part[kTogether] = {};
    for (size_t next = 0, have = 0; next < task.in.size(); have = 1) {
      for (; have < kTogether && next < task.in.size(); ++have, ++next) {
        const Stored* in = static_cast<const Stored*>(task.in[next]) + at;
        if (far) fetch(in, n * sizeof(Stored));
        part[have] = Format::load(in, n, task.pre, room[have]);
      }
      T* to = next == task.in.size() ? result : room[0];
      combine<Op>(to, part, have, n);
      part[0] = to;
    }
    Format::store(result, n, task.post, out);
    for (size_t k = 0; k < task.out.size(); ++k) {
      Stored* to = static_cast<Stored*>(task.out[k]) + at;
      if (to == out || (k > 0 && task.out[k] == task.out[0])) continue;
      if (k < task.streamed) stream<Set>(to, out, n * sizeof(Stored));
      else std::memcpy(to, out, n * sizeof(Stored));
    }
  }
}

}  // namespace lightcc::kernels
