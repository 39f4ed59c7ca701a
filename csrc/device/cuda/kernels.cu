#include "device/cuda/kernels.h"

#include <algorithm>

#include "device/cuda/pack.h"
#include "device/cuda/scale.h"

namespace lightcc {
namespace {

constexpr int kThreads = 256;
// Some times as many as run there at once, so that multiprocessors that are ahead get more; of large tensors each takes
// many vectors.
constexpr size_t kBlocksPerMultiprocessor = 32;

template <class Format>
__global__ void __launch_bounds__(kThreads)
    scale(typename Format::Stored* to, const typename Format::Stored* from, size_t count, scaling::Factor factor) {
  const size_t thread = size_t{blockIdx.x} * kThreads + threadIdx.x;
  scaling::scale_share<Format>(thread, size_t{gridDim.x} * kThreads, to, from, count, factor);
}

// The pieces stay in the constant memory in which arguments come: each block reads few of them. Four blocks of a
// multiprocessor leave each thread the registers for what it reads at once.
template <class Pieces> __global__ void __launch_bounds__(kThreads, 4) copy(const __grid_constant__ Pieces pieces) {
  packing::copy_share(threadIdx.x, kThreads, blockIdx.x, gridDim.x, pieces);
}

#if CUDART_VERSION >= 12010
bool has_long_arguments() {
  static const bool has = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess && driver >= 12010;
  }();
  return has;
}
using MostPieces = packing::ManyPieces;
#else
bool has_long_arguments() { return false; }
using MostPieces = packing::FewPieces;
#endif

cudaError_t most_blocks(int device, size_t* blocks) {
  int multiprocessors = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *blocks = kBlocksPerMultiprocessor * static_cast<size_t>(multiprocessors);
  return status;
}

}  // namespace

cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, copy<packing::FewPieces>);
  if (status == cudaSuccess && has_long_arguments()) status = cudaFuncGetAttributes(&attributes, copy<MostPieces>);
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
  const auto launch = [&](auto pieces) {
    const size_t taken = packing::take(pieces, copies, count);
    const dim3 grid(static_cast<unsigned>(std::min<size_t>(packing::tiles_of(pieces), most)));
    void* arguments[] = {&pieces};
    if (pieces.count == 1)  // the driver knows how best to copy that
      status = cudaMemcpyAsync(pieces.to[0], pieces.from[0], pieces.bytes[0], cudaMemcpyDefault, stream);
    else if (pieces.count > 1)
      status = cudaLaunchKernel(copy<decltype(pieces)>, grid, dim3(kThreads), arguments, 0, stream);
    copies += taken;
    count -= taken;
  };
  while (status == cudaSuccess && count > 0) {
    if (count > packing::FewPieces::kRoom && has_long_arguments())
      launch(MostPieces{});
    else
      launch(packing::FewPieces{});
  }
  return status;
}

}  // namespace lightcc
