// The kernels that select and send the largest elements (device/cuda/topk_encode.h).
#include "device/cuda/topk_encode.h"

using namespace lightcc::gpu;

extern "C" __global__ void __launch_bounds__(PieceBlock::kThreads) lightcc_topk_prepare(const EncodeBatch batch) {
  __shared__ PrepareShared shared;
  PieceBlock block;
  prepare(block, shared, batch, blockIdx.x);
}

// Four blocks of a multiprocessor leave each thread the registers for what it reads at once.
extern "C" __global__ void __launch_bounds__(TileBlock::kThreads, 4) lightcc_topk_collect(const EncodeBatch batch) {
  __shared__ CollectShared shared;
  TileBlock block;
  collect(block, shared, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_topk_rescue(const EncodeBatch batch) {
  __shared__ HistogramShared shared;
  TileBlock block;
  rescue_share(block, shared, batch, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads, 4) lightcc_topk_recollect(const EncodeBatch batch) {
  __shared__ CollectShared shared;
  TileBlock block;
  recollect_share(block, shared, batch, blockIdx.x, gridDim.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_topk_cut0(const EncodeBatch batch) {
  __shared__ HistogramShared shared;
  TileBlock block;
  cut<0>(block, shared, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_topk_cut1(const EncodeBatch batch) {
  __shared__ HistogramShared shared;
  TileBlock block;
  cut<1>(block, shared, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_topk_cut2(const EncodeBatch batch) {
  __shared__ HistogramShared shared;
  TileBlock block;
  cut<2>(block, shared, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_topk_count(const EncodeBatch batch) {
  __shared__ SpanShared shared;
  TileBlock block;
  count(block, shared, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(PieceBlock::kThreads) lightcc_topk_place(const EncodeBatch batch) {
  __shared__ PlaceShared shared;
  PieceBlock block;
  place(block, shared, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_topk_write(const EncodeBatch batch) {
  __shared__ SpanShared shared;
  TileBlock block;
  write(block, shared, batch, blockIdx.x);
}
