// The kernels that scale, one for each DType (device/cuda/scale.h).
#include "device/cuda/scale.h"

#include "device/cuda/launch.h"

using lightcc::kThreads;
using lightcc::scaling::Factor;

#define LIGHTCC_SCALE(dtype, Format)                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                       \
      lightcc_scale_##dtype(void* to, const void* from, size_t count, const Factor factor) {                   \
    using Stored = typename lightcc::scaling::Format::Stored;                                                  \
    const size_t thread = size_t{blockIdx.x} * kThreads + threadIdx.x, threads = size_t{gridDim.x} * kThreads; \
    lightcc::scaling::scale_share<lightcc::scaling::Format>(                                                   \
        thread, threads, static_cast<Stored*>(to), static_cast<const Stored*>(from), count, factor);           \
  }
LIGHTCC_SCALE(0, Integer<uint8_t>)
LIGHTCC_SCALE(1, Integer<int8_t>)
LIGHTCC_SCALE(2, Integer<uint16_t>)
LIGHTCC_SCALE(3, Integer<int16_t>)
LIGHTCC_SCALE(4, Integer<int32_t>)
LIGHTCC_SCALE(5, Integer<int64_t>)
LIGHTCC_SCALE(6, ScaledFloat16)
LIGHTCC_SCALE(7, Float32)
LIGHTCC_SCALE(8, Float64)
LIGHTCC_SCALE(9, ScaledBoolean)
LIGHTCC_SCALE(10, ScaledBfloat16)
LIGHTCC_SCALE(11, Integer<uint32_t>)
LIGHTCC_SCALE(12, Integer<uint64_t>)
