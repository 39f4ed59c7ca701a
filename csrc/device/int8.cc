#include "device/int8.h"

#include <cstring>

#include "base/error.h"
#include "base/wire.h"
#include "device/int8_kernels.h"

namespace lightcc {

using namespace kernels;

namespace {

size_t groups_of(size_t count) { return (count + kInt8Group - 1) / kInt8Group; }

// Where in a body lies what belongs to a block.
size_t scales_at(size_t block) { return block * (kCodecBlock / kInt8Group) * sizeof(float); }
size_t values_at(size_t block, size_t count) { return groups_of(count) * sizeof(float) + block * kCodecBlock; }

}  // namespace

size_t int8_message_bytes(size_t count) { return groups_of(count) * sizeof(float) + count; }

Int8Encoding::Int8Encoding(Isa isa) : loops_(&int8_loops(isa)) {}

void Int8Encoding::start(const Int8Piece& piece, std::byte* body) {
  piece_ = piece;
  body_ = body;
  block_ = 0;
  finite_ = true;
  phase_ = piece.count > 0 ? Phase::encode : Phase::done;
}

bool Int8Encoding::step() {
  switch (phase_) {
    case Phase::encode: encode(); break;
    case Phase::roll_back: roll_back(); break;
    case Phase::done: break;
  }
  return phase_ != Phase::done;
}

void Int8Encoding::encode() {
  const size_t at = block_ * kCodecBlock;
  const bool finite = loops_->encode(Int8Task{.residual = piece_.residual + at,
                                              .gradient = piece_.gradient + at,
                                              .prescale = piece_.prescale,
                                              .count = length_of_block(block_, piece_.count),
                                              .scales = body_ + scales_at(block_),
                                              .values = body_ + values_at(block_, piece_.count)});
  finite_ = finite_ && finite;
  if (++block_ < blocks_of(piece_.count)) return;
  block_ = 0;
  phase_ = finite_ ? Phase::done : Phase::roll_back;
}

void Int8Encoding::roll_back() {
  const size_t at = block_ * kCodecBlock;
  std::memcpy(piece_.residual + at, piece_.gradient + at, length_of_block(block_, piece_.count) * sizeof(float));
  if (++block_ == blocks_of(piece_.count)) phase_ = Phase::done;
}

Int8Message::Int8Message(ConstSpan body, size_t count, Isa isa)
    : loops_(&int8_loops(isa)), body_(body.data()), count_(count) {
  if (body.size() == int8_message_bytes(count)) return;
  throw Error(Code::internal, "an int8 message is malformed: " + std::to_string(body.size()) + " bytes for " +
                                  std::to_string(count) + " elements");
}

void Int8Message::add_to(float* out, size_t block) const {
  loops_->add(out + block * kCodecBlock, length_of_block(block, count_), body_ + scales_at(block),
              body_ + values_at(block, count_));
}

}  // namespace lightcc
