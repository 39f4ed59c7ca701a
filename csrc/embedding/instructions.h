// The instruction sets that the loops over rows are compiled for, and which of them this machine has. Every function
// that such a loop is made of is inlined into one function for each set, so that the compiler finds the instructions by
// itself. All sets give the same bits: the compiler contracts nothing, and sums have a fixed order.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lightcc::embedding {

#define LIGHTCC_ROW_INLINE [[gnu::always_inline]] inline
#define LIGHTCC_ROW_LAMBDA __attribute__((always_inline))
#if defined(__x86_64__)
#define LIGHTCC_ROW_AVX2 [[gnu::target("avx2")]]
#define LIGHTCC_ROW_AVX512 [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]]
#else
#define LIGHTCC_ROW_AVX2
#define LIGHTCC_ROW_AVX512
#endif

enum class Instructions { plain, avx2, avx512 };

inline bool has(Instructions set) {
#if defined(__x86_64__)
  if (set == Instructions::avx2) return __builtin_cpu_supports("avx2");
  if (set == Instructions::avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return set == Instructions::plain;
}

inline Instructions best_instructions() {
  static const Instructions best = has(Instructions::avx512) ? Instructions::avx512
                                   : has(Instructions::avx2) ? Instructions::avx2
                                                             : Instructions::plain;
  return best;
}

// Asks for the memory of a record, which begins anywhere in its first line: its last line needs a question of its own.
// Were it not inlined, GCC would take it for a function without an effect and drop its calls.
LIGHTCC_ROW_INLINE void ask_for(const void* record, size_t bytes) {
  const char* at = static_cast<const char*>(record);
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i);
  __builtin_prefetch(at + bytes - 1);
}

// body(i) for each number of a row, none of which depends on another one. Blocks have a constant length, so that each
// becomes a few wide instructions.
template <class Body> LIGHTCC_ROW_INLINE void each_number(int64_t d, Body body) {
  constexpr int64_t kBlock = 16;
  int64_t i = 0;
  for (; i + kBlock <= d; i += kBlock) {
#pragma GCC ivdep
    for (int64_t k = 0; k < kBlock; ++k) body(i + k);
  }
#pragma GCC ivdep
  for (; i < d; ++i) body(i);
}

}  // namespace lightcc::embedding
