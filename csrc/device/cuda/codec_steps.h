// The launches that encode or decode a batch, in order: which kernel, on how many blocks of how many threads. For the
// host; kernels have the names that their bodies have, behind lightcc_.
#pragma once
#include <algorithm>
#include <vector>

#include "device/cuda/codec_plan.h"

namespace lightcc::gpu {

// X(name, bodies' argument, threads)
#define LIGHTCC_CODEC_KERNELS(X)                \
  X(topk_prepare, EncodeBatch, 1024)            \
  X(topk_collect, EncodeBatch, 256)             \
  X(topk_rescue, EncodeBatch, 256)              \
  X(topk_recollect, EncodeBatch, 256)           \
  X(topk_cut0, EncodeBatch, 256)                \
  X(topk_cut1, EncodeBatch, 256)                \
  X(topk_cut2, EncodeBatch, 256)                \
  X(topk_count, EncodeBatch, 256)               \
  X(topk_place, EncodeBatch, 1024)              \
  X(topk_write, EncodeBatch, 256)               \
  X(topk_begin_entries, DecodeBatch, 256)       \
  X(topk_decode, DecodeBatch, 256)              \
  X(int8_prepare, Int8EncodeBatch, 256)               \
  X(int8_encode, Int8EncodeBatch, 256)                \
  X(int8_finish, Int8EncodeBatch, 256)                \
  X(int8_prepare_decode, Int8DecodeBatch, 256)  \
  X(int8_decode, Int8DecodeBatch, 256)

enum class CodecKernel : uint32_t {
#define LIGHTCC_ONE(name, Batch, threads) name,
  LIGHTCC_CODEC_KERNELS(LIGHTCC_ONE)
#undef LIGHTCC_ONE
};

inline constexpr const char* kCodecKernelNames[] = {
#define LIGHTCC_ONE(name, Batch, threads) "lightcc_" #name,
    LIGHTCC_CODEC_KERNELS(LIGHTCC_ONE)
#undef LIGHTCC_ONE
};
inline constexpr uint32_t kCodecKernelThreads[] = {
#define LIGHTCC_ONE(name, Batch, threads) threads,
    LIGHTCC_CODEC_KERNELS(LIGHTCC_ONE)
#undef LIGHTCC_ONE
};

struct CodecStep {
  CodecKernel kernel;
  uint32_t blocks, blocks_y = 1;
};

// multiprocessors: of the device; steps that are rarely needed take no more blocks than run at once.
inline std::vector<CodecStep> steps_of(const EncodeBatch& batch, uint32_t multiprocessors) {
  const uint32_t some = std::min(batch.tiles, 8 * multiprocessors);
  return {{CodecKernel::topk_prepare, batch.piece_count},
          {CodecKernel::topk_collect, batch.tiles},
          {CodecKernel::topk_rescue, some},
          {CodecKernel::topk_recollect, some},
          {CodecKernel::topk_cut0, batch.chunks},
          {CodecKernel::topk_cut1, batch.chunks},
          {CodecKernel::topk_cut2, batch.chunks},
          {CodecKernel::topk_count, batch.spans},
          {CodecKernel::topk_place, batch.piece_count},
          {CodecKernel::topk_write, batch.spans}};
}
inline std::vector<CodecStep> steps_of(const DecodeBatch& batch, uint32_t) {
  return {{CodecKernel::topk_begin_entries, batch.piece_count, batch.nodes}, {CodecKernel::topk_decode, batch.tiles}};
}
inline std::vector<CodecStep> steps_of(const Int8EncodeBatch& batch, uint32_t) {
  return {{CodecKernel::int8_prepare, batch.piece_count},
          {CodecKernel::int8_encode, batch.tiles},
          {CodecKernel::int8_finish, batch.piece_count}};
}
inline std::vector<CodecStep> steps_of(const Int8DecodeBatch& batch, uint32_t) {
  return {{CodecKernel::int8_prepare_decode, batch.piece_count}, {CodecKernel::int8_decode, batch.tiles}};
}

}  // namespace lightcc::gpu
