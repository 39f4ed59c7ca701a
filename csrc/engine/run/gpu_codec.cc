#include "engine/run/gpu_codec.h"

#include <cstring>
#include <utility>

#include "base/error.h"
#include "collective/piece_codec.h"

namespace lightcc {

int is_half(const Codec& codec) { return codec.kind == CodecKind::topk && codec.width == DType::float16; }

CudaDecode decoding_of(const Collective& c, const CompressedShard& shard, const std::byte* bodies, size_t stride,
                       int nodes, void* out) {
  const size_t count = size_t(shard.count);
  return {.bodies = bodies + shard.body,
          .stride = stride,
          .out = out,
          .count = count,
          .k = piece_elements(c.codec, count),
          .nodes = unsigned(nodes),
          .scale = c.post,
          .dtype = int(c.dtype),
          .half = is_half(c.codec)};
}

void DecodingErrors::expect(std::shared_ptr<CudaEvent> end, std::shared_ptr<StagingSlot> slot, size_t word_at,
                            std::vector<std::string> titles) {
  decodings_.push_back({std::move(end), std::move(slot), word_at, std::move(titles)});
}

void DecodingErrors::watch() {
  while (!decodings_.empty() && decodings_[0].end->reached()) {
    const Decoding decoding = std::move(decodings_[0]);
    decodings_.erase(decodings_.begin());
    uint64_t word = 0;
    std::memcpy(&word, decoding.slot->data() + decoding.word_at, sizeof word);
    if (word == 0) continue;
    const size_t piece = size_t(word & 0xffffffff) - 1, node = size_t(word >> 32);
    throw Error(Code::internal, decoding.titles.at(piece) + ": host " + std::to_string(node) +
                                    " of the group sent compressed gradients that are none");
  }
}

}  // namespace lightcc
