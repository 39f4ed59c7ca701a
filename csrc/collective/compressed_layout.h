// How tensors that are compressed together are cut among lanes, and share messages between the owners of a lane: pure,
// and the same for all ranks.
#pragma once
#include <vector>

#include "collective/node_links.h"
#include "collective/residual.h"

namespace lightcc {

inline constexpr int64_t kCompressedPartBytes = 4 << 20;  // of gradients; its exchange takes longer than to start it

struct CompressedShard {            // what a lane has of a tensor
  int64_t first, count;             // in the tensor
  size_t body;                      // where its bytes begin in the message of its part
};

struct CompressedTensor {
  TensorPlace place;
  std::vector<CompressedShard> shards;  // by own lane
  std::vector<int64_t> counts;      // elements of each member of the node, side by side
  size_t part;
};

struct CompressedPart {             // consecutive tensors that share a message a lane
  size_t begin, end;
  std::vector<size_t> message_bytes;  // by own lane
};

struct CompressedLayout {
  std::vector<CompressedTensor> tensors;
  std::vector<CompressedPart> parts;
};

// A tensor is cut by itself: so what is sent of it does not depend on what it travels with. A part ends with the tensor
// that brings it to part_bytes. header_bytes: at the beginning of each message.
CompressedLayout lay_out_compressed(const Collective&, const NodeLinks&, int64_t part_bytes, size_t header_bytes);

// What the exchange of a tensor among so many nodes counts.
CompressionTotals totals_of(const CompressedTensor&, const Codec&, DType, int nodes);

}  // namespace lightcc
