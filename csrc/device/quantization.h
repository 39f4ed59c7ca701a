// Quantization with error feedback: the sum of a gradient and of what earlier steps have left behind is sent as an
// integer of a few bits an element, and what rounding has taken is left behind for later steps. For one piece, a rank's
// shard of one tensor. The elements of a group share a scale. A format says how long a group is and what the largest
// integer is, m:
//
//   acc = residual + prescale * gradient
//   scale = largest |acc| of the group / m, but at least the smallest normal number, at most the largest whose
//            m-fold is finite, and 0 if all are 0
//   value = acc / scale, rounded to nearest, ties to even: -m to m
//   residual = acc - value * scale
//
// 1. The result depends on the piece alone: not on the instruction set or on what has run before.
// 2. value * scale + residual is acc, exactly: the product, rounded as the receiver rounds it, is 0 or between half of
//    acc and twice acc, and such a difference is a float32 (Sterbenz). Nothing finite is sent as infinity or NaN.
// 3. |residual| is at most half a scale, and what rounding adds to that, less than 2^-14 of it. The smallest scale is
//    what keeps it so for subnormal sums, whose m-th parts are too coarse to be a scale.
// 4. A group with a sum that is not finite has the scale NaN and the values 0, so each of its elements is NaN for
//    whoever receives it. Then the residual of the whole piece is what it was before: a gradient scaler will skip the
//    step. As in topk.h the old residual goes where the gradient was.
//
// A message is
//
//   float32  scales[groups]
//   int8     values[count], or of 4 bits: two in a byte, the first in its lower half
//
// Little-endian, nothing between, nothing behind, so of any alignment.
#pragma once
#include "device/codec.h"
#include "device/cpu.h"

namespace lightcc {

// Scales make a message 1/64 longer. Of normal sums the largest of 256 is 3.05 deviations, 2.82 of 128, 3.26 of 512:
// to halve the group would cost another 1/64 for an error that is 7 % smaller; to double it would gain half as much for
// one that is 7 % larger, and an outlier would coarsen twice as many. A block is whole groups.
struct Int8 {
  static constexpr const char* kName = "int8";
  static constexpr size_t kGroup = 256;
  static constexpr int kLargest = 127;
  static constexpr size_t value_bytes(size_t count) { return count; }
};
// Scales make a message 1/8 longer: with so few integers a group's largest sum counts for more.
struct Int4 {
  static constexpr const char* kName = "int4";
  static constexpr size_t kGroup = 64;
  static constexpr int kLargest = 7;
  static constexpr size_t value_bytes(size_t count) { return (count + 1) / 2; }
};
static_assert(kCodecBlock % Int8::kGroup == 0 && kCodecBlock % Int4::kGroup == 0);

template <class Format> constexpr size_t scales_of(size_t count) {
  return (count + Format::kGroup - 1) / Format::kGroup;
}
template <class Format> constexpr size_t quantized_bytes(size_t count) {
  return scales_of<Format>(count) * sizeof(float) + Format::value_bytes(count);
}

namespace kernels {
struct QuantizationLoops;
}

struct QuantizedPiece {
  float* gradient;  // is overwritten
  float* residual;
  size_t count;
  float prescale = 1;
};

// One piece at a time, any number one after another; it has no memory of its own. The piece and the body are the
// caller's until step() has returned false. One thread at a time.
template <class Format> class QuantizedEncoding {
 public:
  explicit QuantizedEncoding(Isa isa = best_isa());

  // Does no work yet. `body` has room for quantized_bytes<Format>(count).
  void start(const QuantizedPiece&, std::byte* body);

  // Takes at most a block of the piece (reads 512 KiB, writes that and at most 65 KiB). Is there more to do?
  bool step();

  bool finite() const { return finite_; }  // all sums; if not, the residual has not changed

 private:
  enum class Phase { encode, roll_back, done };

  void encode();
  void roll_back();

  const kernels::QuantizationLoops* loops_;
  QuantizedPiece piece_{};
  std::byte* body_ = nullptr;
  Phase phase_ = Phase::done;
  size_t block_ = 0;  // the next to encode or restore
  bool finite_ = true;
};

// A body from the network, which is the caller's and must stay. Nothing is believed: an Error{internal} says what is
// wrong. Any bits are a scale, and any bits are a value.
template <class Format> class QuantizedMessage {
 public:
  QuantizedMessage(ConstSpan body, size_t count, Isa isa = best_isa());

  size_t blocks() const { return blocks_of(count_); }
  // out[i] += value * scale for the elements of a block, rounded twice; `out` is the whole piece.
  void add_to(float* out, size_t block) const;

 private:
  const kernels::QuantizationLoops* loops_;
  const std::byte* body_;
  size_t count_;
};

extern template class QuantizedEncoding<Int8>;
extern template class QuantizedEncoding<Int4>;
extern template class QuantizedMessage<Int8>;
extern template class QuantizedMessage<Int4>;

}  // namespace lightcc
