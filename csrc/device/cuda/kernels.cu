#include "device/cuda/kernels.h"

#include <algorithm>

#include "device/cuda/pack.h"
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

// The pieces stay in the constant memory in which arguments come: each block reads few of them.
__global__ void __launch_bounds__(kThreads) copy(const __grid_constant__ packing::Pieces pieces) {
  packing::copy_share(threadIdx.x, kThreads, blockIdx.x, gridDim.x, pieces);
}

cudaError_t most_blocks(int device, size_t* blocks) {
  int multiprocessors = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = kBlocksPerMultiprocessor * static_cast<size_t>(multiprocessors);
  return status;
}

}  // namespace

cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, copy);
  const auto load = [&](auto format) {
    if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, scale<decltype(format)>);
  };
  for (int dtype = 0; scaling::with_format(dtype, load); ++dtype) {}
  return status;
}

cudaError_t launch_scale(int device, cudaStream_t stream, int dtype, void* to, const void* from, size_t count,
                         double factor) {
  size_t most = 0;
  cudaError_t status = most_blocks(device, &most);
  if (status != cudaSuccess) return status;
  const bool known = scaling::with_format(dtype, [&](auto format) {
    if (count == 0) return;
    using Format = decltype(format);
    scaling::Factor by(factor);
    void* arguments[] = {&to, &from, &count, &by};
    const size_t vectors = count * sizeof(typename Format::Stored) / sizeof(scaling::Vector);
    const size_t blocks = vectors / kThreads + 1;
    const dim3 grid(static_cast<unsigned>(std::min(blocks, most)));
    status = cudaLaunchKernel(scale<Format>, grid, dim3(kThreads), arguments, 0, stream);
  });
  return known ? status : cudaErrorInvalidValue;
}

cudaError_t launch_copies(int device, cudaStream_t stream, const CudaCopy* copies, size_t count) {
  size_t most = 0;
  cudaError_t status = most_blocks(device, &most);
  for (size_t taken = 0; status == cudaSuccess && taken < count;) {
    packing::Pieces pieces{};
    taken += packing::take(pieces, copies + taken, count - taken);
    void* arguments[] = {&pieces};
    const dim3 grid(static_cast<unsigned>(std::min<size_t>(packing::tiles_of(pieces), most)));
    if (pieces.count == 1)  // the driver knows how best to copy that
      status = cudaMemcpyAsync(pieces.to[0], pieces.from[0], pieces.bytes[0], cudaMemcpyDefault, stream);
    else if (pieces.count > 1)
      status = cudaLaunchKernel(copy, grid, dim3(kThreads), arguments, 0, stream);
  }
  return status;
}

}  // namespace lightcc
