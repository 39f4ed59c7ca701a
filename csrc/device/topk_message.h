// What a rank sends of a piece to the other owners of its shard, and how it is added to a dense vector. The body:
//
//   uint32   counts[blocks]   of each block of kCodecBlock elements how many are here
//   uint16   indices[k]       where in their block, ascending in each block
//   float32 or float16        values[k]
//
// Little-endian, nothing between, nothing behind, so of any alignment. k is the sum of the counts.
#pragma once
#include "device/half.h"
#include "device/topk.h"

namespace lightcc {

// values: float32 or float16, here and below.
size_t topk_message_bytes(size_t count, size_t k, DType values);

// Writes entries [from, to) of the body; the counts come with entry 0.
void write_topk_message(const TopKSelected&, DType values, size_t from, size_t to, std::byte* body);

// A body from the network, which is the caller's and must stay. Nothing is believed: an Error{internal} says what is
// wrong, and nothing is ever written outside of the piece. Sizes and counts are checked when it is made, a block's
// indices before the first of them is used.
class TopKMessage {
 public:
  TopKMessage(ConstSpan body, size_t count, DType values);

  size_t k() const { return begins_.back(); }
  size_t blocks() const { return begins_.size() - 1; }
  // out[i] += value for the entries of a block, in ascending order; `out` is the whole piece.
  void add_to(float* out, size_t block) const;

 private:
  size_t length_of(size_t block) const;

  size_t count_;
  DType type_;
  std::vector<size_t> begins_;  // of each block's entries, and their end
  const std::byte* indices_;
  const std::byte* values_;
};

}  // namespace lightcc
