// How one piece of a tensor, a rank's shard of it, becomes bytes for the owners of the same shard on other nodes, and
// how these add up what they receive. One pair of classes a codec; all work on float32.
#pragma once
#include <memory>

#include "collective/residual.h"

namespace lightcc {

// How many bytes a piece of `count` elements becomes: the same on all ranks. 0 for no elements.
size_t piece_bytes(const Codec&, size_t count);
// How many of them are sent.
size_t piece_elements(const Codec&, size_t count);

struct PieceTask {
  float* gradient;          // is overwritten
  size_t count;             // at least 1
  float scale;              // of the gradient
  ResidualPiece* residual;  // of `count` elements
  std::byte* body;          // piece_bytes(); written when step() has returned false
};

// acc = residual + scale * gradient becomes bytes; the residual is what they do not say. If a sum is not finite, the
// bytes say so, and the residual stays as it was.
class PieceEncoder {
 public:
  virtual ~PieceEncoder() = default;
  virtual void start(const PieceTask&) = 0;  // what it names is the caller's until step() has returned false
  virtual bool step() = 0;                   // at most a few blocks of work; is there more?
};
std::unique_ptr<PieceEncoder> make_piece_encoder(const Codec&);

class PieceMessage {
 public:
  virtual ~PieceMessage() = default;
  // out[i] += value for what the bytes say of a block of kCodecBlock elements; `out` is the whole piece.
  virtual void add_to(float* out, size_t block) const = 0;
};
// Reads a message from bytes of the network, which must outlive it. Throws Error{internal} if no peer would write them.
std::unique_ptr<PieceMessage> read_piece(const Codec&, ConstSpan body, size_t count);

}  // namespace lightcc
