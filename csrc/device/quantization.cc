#include "device/quantization.h"

#include <cstring>

#include "base/error.h"
#include "base/wire.h"
#include "device/quantization_kernels.h"

namespace lightcc {

using namespace kernels;

namespace {

// Where in a body lies what belongs to a block.
template <class Format> size_t scales_at(size_t block) {
  return scales_of<Format>(block * kCodecBlock) * sizeof(float);
}
template <class Format> size_t values_at(size_t block, size_t count) {
  return scales_of<Format>(count) * sizeof(float) + Format::value_bytes(block * kCodecBlock);
}

}  // namespace

template <class Format>
QuantizedEncoding<Format>::QuantizedEncoding(Isa isa) : loops_(&quantization_loops<Format>(isa)) {}

template <class Format> void QuantizedEncoding<Format>::start(const QuantizedPiece& piece, std::byte* body) {
  piece_ = piece;
  body_ = body;
  block_ = 0;
  finite_ = true;
  phase_ = piece.count > 0 ? Phase::encode : Phase::done;
}

template <class Format> bool QuantizedEncoding<Format>::step() {
  switch (phase_) {
    case Phase::encode: encode(); break;
    case Phase::roll_back: roll_back(); break;
    case Phase::done: break;
  }
  return phase_ != Phase::done;
}

template <class Format> void QuantizedEncoding<Format>::encode() {
  const size_t at = block_ * kCodecBlock;
  const bool finite = loops_->encode(QuantizationTask{.residual = piece_.residual + at,
                                                      .gradient = piece_.gradient + at,
                                                      .prescale = piece_.prescale,
                                                      .count = length_of_block(block_, piece_.count),
                                                      .scales = body_ + scales_at<Format>(block_),
                                                      .values = body_ + values_at<Format>(block_, piece_.count)});
  finite_ = finite_ && finite;
  if (++block_ < blocks_of(piece_.count)) return;
  block_ = 0;
  phase_ = finite_ ? Phase::done : Phase::roll_back;
}

template <class Format> void QuantizedEncoding<Format>::roll_back() {
  const size_t at = block_ * kCodecBlock;
  std::memcpy(piece_.residual + at, piece_.gradient + at, length_of_block(block_, piece_.count) * sizeof(float));
  if (++block_ == blocks_of(piece_.count)) phase_ = Phase::done;
}

template <class Format>
QuantizedMessage<Format>::QuantizedMessage(ConstSpan body, size_t count, Isa isa)
    : loops_(&quantization_loops<Format>(isa)), body_(body.data()), count_(count) {
  if (body.size() == quantized_bytes<Format>(count)) return;
  throw Error(Code::internal, std::string("an ") + Format::kName + " message is malformed: " +
                                  std::to_string(body.size()) + " bytes for " + std::to_string(count) + " elements");
}

template <class Format> void QuantizedMessage<Format>::add_to(float* out, size_t block) const {
  loops_->add(out + block * kCodecBlock, length_of_block(block, count_), body_ + scales_at<Format>(block),
              body_ + values_at<Format>(block, count_));
}

template class QuantizedEncoding<Int8>;
template class QuantizedEncoding<Int4>;
template class QuantizedMessage<Int8>;
template class QuantizedMessage<Int4>;

}  // namespace lightcc
