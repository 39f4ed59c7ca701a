// The kernels that copy many pieces (device/cuda/pack.h), which stay in the constant memory in which arguments come:
// each block reads few of them. Four blocks of a multiprocessor leave each thread the registers for what it reads at
// once.
#include "device/cuda/pack.h"

#include "device/cuda/launch.h"

// Else a compiler may copy arguments that are indexed. CUDA 11.7 brought it, for sm_70 and newer.
#if __CUDA_ARCH__ >= 700 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1107
#define LIGHTCC_IN_PLACE __grid_constant__
#else
#define LIGHTCC_IN_PLACE
#endif

using lightcc::kThreads;

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    lightcc_copy_few(const LIGHTCC_IN_PLACE lightcc::packing::FewPieces pieces) {
  lightcc::packing::copy_share(threadIdx.x, kThreads, blockIdx.x, gridDim.x, pieces);
}

#if defined(LIGHTCC_LONG_ARGUMENTS)
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    lightcc_copy_many(const LIGHTCC_IN_PLACE lightcc::packing::ManyPieces pieces) {
  lightcc::packing::copy_share(threadIdx.x, kThreads, blockIdx.x, gridDim.x, pieces);
}
#endif
