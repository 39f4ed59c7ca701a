// The kernels that copy many pieces (device/cuda/pack.h), which stay in the constant memory in which arguments come:
// each block reads few of them. Four blocks of a multiprocessor leave each thread the registers for what it reads at
// once.
#include "device/cuda/pack.h"

#include "device/cuda/launch.h"

using lightcc::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    lightcc_copy_few(const __grid_constant__ lightcc::packing::FewPieces pieces) {
  lightcc::packing::copy_share(threadIdx.x, kThreads, blockIdx.x, gridDim.x, pieces);
}

#if defined(LIGHTCC_LONG_ARGUMENTS)
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    lightcc_copy_many(const __grid_constant__ lightcc::packing::ManyPieces pieces) {
  lightcc::packing::copy_share(threadIdx.x, kThreads, blockIdx.x, gridDim.x, pieces);
}
#endif
