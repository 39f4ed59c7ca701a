// The kernels of codecs (device/cuda/codec_steps.h) as plain C++: the blocks of a grid one after the other, in another
// order each time.
#pragma once
#include <memory>
#include <random>

#include "device/cuda/codec_steps.h"

namespace lightcc::test {

class HostGrid {
 public:
  explicit HostGrid(uint32_t seed) : random_(seed) {}

  // All steps of a batch, in their order.
  template <class Batch>
  void run(const Batch& batch) {
    constexpr uint32_t kMultiprocessors = 2;
    for (const gpu::CodecStep& step : gpu::steps_of(batch, kMultiprocessors)) run_step(step, batch);
  }

  template <class Batch>
  void run_step(const gpu::CodecStep& step, const Batch& batch) {
    std::vector<uint32_t> blocks(step.blocks * step.blocks_y);
    for (uint32_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), random_);
    for (const uint32_t block : blocks) run_block(step, batch, block % step.blocks, block / step.blocks);
  }

 private:
  template <class Block>
  Block block() {
    return Block{static_cast<uint32_t>(random_())};
  }
  // Shared memory has any bits at first.
  template <class Shared>
  Shared& shared() {
    memory_.resize(std::max(memory_.size(), sizeof(Shared) / sizeof(uint64_t) + 1));
    for (uint64_t& word : memory_) word = random_() | uint64_t{random_()} << 32;
    return *reinterpret_cast<Shared*>(memory_.data());
  }

  void run_block(const gpu::CodecStep& step, const gpu::EncodeBatch& batch, uint32_t number, uint32_t) {
    using namespace gpu;
    auto wide = block<PieceBlock>();
    auto narrow = block<TileBlock>();
    switch (step.kernel) {
      case CodecKernel::topk_prepare: return prepare(wide, shared<PrepareShared>(), batch, number);
      case CodecKernel::topk_collect: return collect(narrow, shared<CollectShared>(), batch, number);
      case CodecKernel::topk_rescue: return rescue_share(narrow, shared<HistogramShared>(), batch, number, step.blocks);
      case CodecKernel::topk_recollect:
        return recollect_share(narrow, shared<CollectShared>(), batch, number, step.blocks);
      case CodecKernel::topk_cut0: return cut<0>(narrow, shared<HistogramShared>(), batch, number);
      case CodecKernel::topk_cut1: return cut<1>(narrow, shared<HistogramShared>(), batch, number);
      case CodecKernel::topk_cut2: return cut<2>(narrow, shared<HistogramShared>(), batch, number);
      case CodecKernel::topk_place: return place(wide, shared<PlaceShared>(), batch, number);
      case CodecKernel::topk_count: return count(narrow, shared<SpanShared>(), batch, number);
      case CodecKernel::topk_write: return write(narrow, shared<SpanShared>(), batch, number);
      default: std::abort();
    }
  }
  void run_block(const gpu::CodecStep& step, const gpu::DecodeBatch& batch, uint32_t number, uint32_t node) {
    using namespace gpu;
    auto narrow = block<DecodeBlock>();
    if (step.kernel == CodecKernel::topk_decode) decode(narrow, shared<DecodeShared>(), batch, number);
    else begin_entries(narrow, shared<EntryShared>(), batch, number, node);
  }
  void run_block(const gpu::CodecStep& step, const gpu::Int8EncodeBatch& batch, uint32_t number, uint32_t) {
    using namespace gpu;
    auto narrow = block<TileBlock>();
    if (step.kernel == CodecKernel::int8_prepare) int8_prepare(narrow, batch, number);
    else if (step.kernel == CodecKernel::int8_encode) int8_encode(narrow, batch, number);
    else int8_finish(narrow, batch, number);
  }
  void run_block(const gpu::CodecStep& step, const gpu::Int8DecodeBatch& batch, uint32_t number, uint32_t) {
    using namespace gpu;
    auto narrow = block<TileBlock>();
    if (step.kernel == CodecKernel::int8_decode) int8_decode(narrow, batch, number);
    else int8_prepare_decode(narrow, batch, number);
  }

  std::mt19937 random_;
  std::vector<uint64_t> memory_;
};

// Lays the batch out in memory of its own, whose bytes are any at first, and runs it.
template <class Batch, class Piece>
void run_on_host(std::vector<Piece>& pieces, uint32_t seed, Batch batch = {}) {
  const Batch given = batch;
  std::mt19937_64 random(seed);
  std::vector<uint64_t> memory(gpu::lay_out(pieces.data(), pieces.size(), nullptr, batch) / sizeof(uint64_t));
  for (uint64_t& word : memory) word = random();
  auto* const begin = reinterpret_cast<std::byte*>(memory.data());
  gpu::lay_out(pieces.data(), pieces.size(), begin, batch);
  std::copy(pieces.begin(), pieces.end(), reinterpret_cast<Piece*>(begin));
  if constexpr (requires { batch.error; }) batch.error = given.error;
  HostGrid(seed).run(batch);
}

}  // namespace lightcc::test
