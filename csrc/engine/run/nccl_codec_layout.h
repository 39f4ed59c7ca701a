// Where what a part of a compressed all-reduce by NCCL needs stands in memory of the GPU: pure. A reduce-scatter takes
// equally large shares of members that are side by side; tensors of which that is not so are copied into such shares.
#pragma once
#include <cstddef>
#include <vector>

#include "collective/compressed_layout.h"

namespace lightcc {

struct NcclShard {             // a member's of a tensor
  size_t in_tensor, in_share;  // where it begins
  size_t bytes;
};

struct NcclPart {
  size_t share_bytes = 0;      // of each member; the same on all of them
  bool is_even = false;        // its one tensor is made of such shares
  std::vector<std::vector<NcclShard>> shards;  // by tensor of the part, and member of the node
  size_t message_bytes = 0;    // from one node's message to the next one's

  // Bytes of a part's memory: the shares, if they are copied, and behind them the messages.
  size_t messages_at(bool copies, size_t members) const { return copies ? round_up(share_bytes * members) : 0; }
  size_t memory_bytes(bool copies, size_t members, size_t nodes) const {
    return messages_at(copies, members) + message_bytes * nodes;
  }
};

NcclPart lay_out_for_nccl(const CompressedLayout&, size_t part, DType);

}  // namespace lightcc
