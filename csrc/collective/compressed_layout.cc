#include "collective/compressed_layout.h"

#include "collective/piece_codec.h"

namespace lightcc {

CompressedLayout lay_out_compressed(const Collective& c, const NodeLinks& links, int64_t part_bytes,
                                    size_t header_bytes) {
  const int64_t element = int64_t(size_of(c.dtype));
  const LaneRange own = links.own_lanes();
  const int members = int(links.members().size());
  CompressedLayout layout;
  int64_t bytes = 0;  // of the last part
  for (const TensorPlace& place : c.tensors) {
    const auto begin = [&](int lane) { return border(place.count, lane, links.lanes(), int64_t(kLine) / element); };
    if (layout.parts.empty() || bytes >= part_bytes) {
      const size_t next = layout.tensors.size();
      layout.parts.push_back({next, next, std::vector<size_t>(size_t(own.end - own.begin), header_bytes)});
      bytes = 0;
    }
    CompressedPart& part = layout.parts.back();
    CompressedTensor& tensor = layout.tensors.emplace_back(CompressedTensor{place, {}, {}, layout.parts.size() - 1});
    for (int lane = own.begin; lane < own.end; ++lane) {
      size_t& message = part.message_bytes[size_t(lane - own.begin)];
      const int64_t count = begin(lane + 1) - begin(lane);
      tensor.shards.push_back({begin(lane), count, message});
      message += piece_bytes(c.codec, size_t(count));
    }
    for (int member = 0; member < members; ++member) {
      const LaneRange lanes = lanes_of(links.lanes(), members, member);
      tensor.counts.push_back(begin(lanes.end) - begin(lanes.begin));
    }
    ++part.end;
    bytes += place.count * element;
  }
  return layout;
}

CompressionTotals totals_of(const CompressedTensor& tensor, const Codec& codec, DType dtype, int nodes) {
  CompressionTotals totals;
  const int64_t element = int64_t(size_of(dtype));
  const uint64_t others = uint64_t(nodes) - 1;
  totals.gradient_bytes += uint64_t(tensor.place.count * element);
  for (const CompressedShard& shard : tensor.shards) {
    totals.elements += uint64_t(shard.count);
    totals.sent_elements += piece_elements(codec, size_t(shard.count));
    totals.sent_bytes += others * piece_bytes(codec, size_t(shard.count));
    totals.dense_sent_bytes += 2 * others * uint64_t(shard.count * element) / uint64_t(nodes);
  }
  return totals;
}

}  // namespace lightcc
