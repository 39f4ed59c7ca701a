#include "device/cuda/kernels.h"

#include <algorithm>

#include "device/cuda/scale.h"

namespace lightcc {
namespace {

constexpr int kThreads = 256;
// Enough for all threads that a multiprocessor can have; of large tensors each takes many vectors.
constexpr size_t kBlocksPerMultiprocessor = 8;

template <class Format>
__global__ void __launch_bounds__(kThreads)
    scale(typename Format::Stored* to, const typename Format::Stored* from, size_t count, scaling::Factor factor) {
  const size_t thread = size_t{blockIdx.x} * kThreads + threadIdx.x;
  scaling::scale_share<Format>(thread, size_t{gridDim.x} * kThreads, to, from, count, factor);
}

}  // namespace

cudaError_t load_kernels() {
  cudaError_t status = cudaSuccess;
  const auto load = [&](auto format) {
    cudaFuncAttributes attributes;
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, scale<decltype(format)>);
  };
  for (int dtype = 0; scaling::with_format(dtype, load); ++dtype) {}
  return status;
}

cudaError_t launch_scale(int device, cudaStream_t stream, int dtype, void* to, const void* from, size_t count,
                         double factor) {
  int multiprocessors = 0;
  cudaError_t status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const bool known = scaling::with_format(dtype, [&](auto format) {
    if (count == 0) return;
    using Format = decltype(format);
    scaling::Factor by(factor);
    void* arguments[] = {&to, &from, &count, &by};
    const size_t vectors = count * sizeof(typename Format::Stored) / sizeof(scaling::Vector);
    const size_t blocks = vectors / kThreads + 1;
    const size_t most = kBlocksPerMultiprocessor * static_cast<size_t>(multiprocessors);
    const dim3 grid(static_cast<unsigned>(std::min(blocks, most)));
    status = cudaLaunchKernel(scale<Format>, grid, dim3(kThreads), arguments, 0, stream);
  });
  return known ? status : cudaErrorInvalidValue;
}

}  // namespace lightcc
