// The kernels that liblightcc_cuda.so brings, for functions.cu. They run on the current device.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "device/cuda.h"

namespace lightcc {

// Loads them all. Else the first launch of each loads it, and that may wait for all that the device has been given,
// which may itself wait for another rank (CUDA's programming guide, "Lazy Loading").
cudaError_t load_kernels();

// As CudaFunctions::scale (device/cuda.h).
cudaError_t launch_scale(int device, cudaStream_t, int dtype, void* to, const void* from, size_t count, double factor);

// As CudaFunctions::copy_all.
cudaError_t launch_copies(int device, cudaStream_t, const CudaCopy* copies, size_t count);

}  // namespace lightcc
