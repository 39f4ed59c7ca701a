// The kernels that quantize to int8 and add up what the nodes have sent (device/cuda/int8_codec.h).
#include "device/cuda/int8_codec.h"

using namespace lightcc::gpu;

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_int8_prepare(const Int8EncodeBatch batch) {
  TileBlock block;
  int8_prepare(block, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads, 4) lightcc_int8_encode(const Int8EncodeBatch batch) {
  TileBlock block;
  int8_encode(block, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_int8_finish(const Int8EncodeBatch batch) {
  TileBlock block;
  int8_finish(block, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads)
    lightcc_int8_prepare_decode(const Int8DecodeBatch batch) {
  TileBlock block;
  int8_prepare_decode(block, batch, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(TileBlock::kThreads) lightcc_int8_decode(const Int8DecodeBatch batch) {
  TileBlock block;
  int8_decode(block, batch, blockIdx.x);
}
