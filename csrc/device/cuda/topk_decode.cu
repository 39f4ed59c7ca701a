// The kernels that add up what the nodes have sent of the largest elements (device/cuda/topk_decode.h).
#include "device/cuda/topk_decode.h"

using namespace lightcc::gpu;

extern "C" __global__ void __launch_bounds__(EntryBlock::kThreads) lightcc_topk_begin_entries(const DecodeBatch batch) {
  __shared__ EntryShared shared;
  EntryBlock block;
  begin_entries(block, shared, batch, blockIdx.x, blockIdx.y);
}

extern "C" __global__ void __launch_bounds__(DecodeBlock::kThreads) lightcc_topk_decode(const DecodeBatch batch) {
  __shared__ DecodeShared shared;
  DecodeBlock block;
  decode(block, shared, batch, blockIdx.x);
}
