// How the bodies of kernels are written that a GPU's block of threads and a loop of the host run alike: as phases. A
// phase is a function of a thread or of a warp, and a barrier follows it; what a thread keeps from one phase to the
// next is a PerThread, what a lane keeps within a phase is a PerLane. On a GPU both are registers, and a phase is
// called once by each thread. The host calls a phase for one thread or warp after the other, in another order each
// time, so that tests see it where a result depends on that order because a barrier is missing.
//
// Within a phase no thread may read what another one writes, but through atomics and the functions of a warp. Whether
// a phase is reached must be the same for all threads of the block.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define LIGHTCC_DEVICE __device__ __forceinline__
#define LIGHTCC_UNROLLED _Pragma("unroll")
#else
#define LIGHTCC_DEVICE inline
#define LIGHTCC_UNROLLED
#endif

namespace lightcc::gpu {

constexpr uint32_t kWarp = 32;  // lanes

#if defined(__CUDACC__)

template <class T>
struct PerLane {
  T own;
  LIGHTCC_DEVICE T& operator[](uint32_t) { return own; }
};

template <class T, uint32_t kThreads>
struct PerThread {
  T own;
  LIGHTCC_DEVICE T& operator[](uint32_t) { return own; }
};

// Calls body(lane) for each lane.
template <class Body>
LIGHTCC_DEVICE void lanes(Body body) {
  body(threadIdx.x % kWarp);
}

// A bit of each lane: what predicate(lane) returns.
template <class Predicate>
LIGHTCC_DEVICE uint32_t ballot(Predicate predicate) {
  return __ballot_sync(~0u, predicate(threadIdx.x % kWarp));
}

// Replaces each lane's x by the sum of x over all lanes before it; returns the sum over all lanes.
template <class T>
LIGHTCC_DEVICE T prefix(PerLane<T>& x) {
  const uint32_t lane = threadIdx.x % kWarp;
  T sum = x.own;
  LIGHTCC_UNROLLED for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
    const T before = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += before;
  }
  x.own = sum - x.own;
  return __shfl_sync(~0u, sum, kWarp - 1);
}

LIGHTCC_DEVICE uint32_t largest(PerLane<uint32_t>& x) {
  uint32_t most = x.own;
  LIGHTCC_UNROLLED for (uint32_t distance = kWarp / 2; distance > 0; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, most, distance);
    most = most > other ? most : other;
  }
  return most;
}

LIGHTCC_DEVICE uint32_t bits_set(uint32_t x) { return static_cast<uint32_t>(__popc(static_cast<int>(x))); }

// These return what was there before.
LIGHTCC_DEVICE uint32_t atomic_add(uint32_t* to, uint32_t x) { return atomicAdd(to, x); }
LIGHTCC_DEVICE uint64_t atomic_add(uint64_t* to, uint64_t x) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
LIGHTCC_DEVICE uint32_t atomic_or(uint32_t* to, uint32_t x) { return atomicOr(to, x); }
LIGHTCC_DEVICE uint64_t exchange(uint64_t* to, uint64_t x) {
  return atomicExch(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
}
LIGHTCC_DEVICE void set_if_zero(uint64_t* to, uint64_t x) {
  atomicCAS(reinterpret_cast<unsigned long long*>(to), 0ull, static_cast<unsigned long long>(x));
}
// What this thread has written, other blocks see before what it writes from now on.
LIGHTCC_DEVICE void fence() { __threadfence(); }

// Rounded to nearest and never contracted, whatever the compiler's options are.
LIGHTCC_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
LIGHTCC_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
LIGHTCC_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }

template <uint32_t kCount>
struct Block {
  static constexpr uint32_t kThreads = kCount, kWarps = kCount / kWarp;
  template <class Phase>
  LIGHTCC_DEVICE void threads(Phase phase) {
    phase(threadIdx.x);
    __syncthreads();
  }
  template <class Phase>
  LIGHTCC_DEVICE void warps(Phase phase) {
    phase(threadIdx.x / kWarp);
    __syncthreads();
  }
};

#else

template <class T>
struct PerLane {
  T all[kWarp];
  T& operator[](uint32_t lane) { return all[lane]; }
};

template <class T, uint32_t kThreads>
struct PerThread {
  T all[kThreads];
  T& operator[](uint32_t thread) { return all[thread]; }
};

template <class Body>
inline void lanes(Body body) {
  for (uint32_t lane = 0; lane < kWarp; ++lane) body(lane);
}

template <class Predicate>
inline uint32_t ballot(Predicate predicate) {
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < kWarp; ++lane) bits |= static_cast<uint32_t>(bool(predicate(lane))) << lane;
  return bits;
}

template <class T>
inline T prefix(PerLane<T>& x) {
  T sum = 0;
  for (T& one : x.all) {
    const T own = one;
    one = sum;
    sum += own;
  }
  return sum;
}

inline uint32_t largest(PerLane<uint32_t>& x) {
  uint32_t most = 0;
  for (const uint32_t one : x.all) most = most > one ? most : one;
  return most;
}

inline uint32_t bits_set(uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }

template <class T>
inline T atomic_add(T* to, T x) {
  const T before = *to;
  *to += x;
  return before;
}
inline uint32_t atomic_or(uint32_t* to, uint32_t x) {
  const uint32_t before = *to;
  *to |= x;
  return before;
}
inline uint64_t exchange(uint64_t* to, uint64_t x) {
  const uint64_t before = *to;
  *to = x;
  return before;
}
inline void set_if_zero(uint64_t* to, uint64_t x) {
  if (*to == 0) *to = x;
}
inline void fence() {}

inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float divide(float a, float b) { return a / b; }

template <uint32_t kCount>
struct Block {
  static constexpr uint32_t kThreads = kCount, kWarps = kCount / kWarp;
  uint32_t random;  // any number

  template <class Phase>
  void threads(Phase phase) {
    in_some_order(kThreads, phase);
  }
  template <class Phase>
  void warps(Phase phase) {
    in_some_order(kWarps, phase);
  }

 private:
  template <class Phase>
  void in_some_order(uint32_t count, Phase& phase) {
    static_assert((kThreads & (kThreads - 1)) == 0);
    random = random * 1664525u + 1013904223u;
    const uint32_t step = random >> 8 | 1, first = random >> 20;  // an odd step meets each of 2^n once
    for (uint32_t i = 0; i < count; ++i) phase((first + i * step) % count);
  }
};

#endif

// The lanes before this one, as bits.
LIGHTCC_DEVICE uint32_t before(uint32_t lane) { return (1u << lane) - 1; }

// ---- sums over a block

template <class T, uint32_t kWarps>
struct WarpSums {
  T of[kWarps];
};

// Replaces each thread's x by the sum of x over all threads before it; returns the sum over all threads.
template <class Block, class T>
LIGHTCC_DEVICE T prefix(Block& block, WarpSums<T, Block::kWarps>& shared, PerThread<T, Block::kThreads>& x) {
  block.warps([&](uint32_t warp) {
    PerLane<T> own;
    lanes([&](uint32_t lane) { own[lane] = x[warp * kWarp + lane]; });
    const T sum = prefix(own);
    lanes([&](uint32_t lane) {
      x[warp * kWarp + lane] = own[lane];
      if (lane == 0) shared.of[warp] = sum;
    });
  });
  T all = 0;
  LIGHTCC_UNROLLED for (uint32_t warp = 0; warp < Block::kWarps; ++warp) all += shared.of[warp];
  block.threads([&](uint32_t thread) {
    for (uint32_t warp = 0; warp < thread / kWarp; ++warp) x[thread] += shared.of[warp];
  });
  return all;
}

}  // namespace lightcc::gpu
