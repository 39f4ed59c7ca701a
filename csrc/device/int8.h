// Int8 quantization with error feedback: the sum of a gradient and of what earlier steps have left behind is sent as
// one byte an element, and what rounding has taken is left behind for later steps. For one piece, a rank's shard of
// one tensor. The elements of a group share a scale.
//
//   acc = residual + prescale * gradient
//   scale = largest |acc| of the group / 127, but at least the smallest normal number, at most the largest whose
//            127-fold is finite, and 0 if all are 0
//   value = acc / scale, rounded to nearest, ties to even: -127 to 127
//   residual = acc - value * scale
//
// 1. The result depends on the piece alone: not on the instruction set or on what has run before.
// 2. value * scale + residual is acc, exactly: the product, rounded as the receiver rounds it, is 0 or between half of
//    acc and twice acc, and such a difference is a float32 (Sterbenz). Nothing finite is sent as infinity or NaN.
// 3. |residual| is at most half a scale, and what rounding adds to that, less than 2^-14 of it. The smallest scale is
//    what keeps it so for subnormal sums, whose 127th parts are too coarse to be a scale.
// 4. A group with a sum that is not finite has the scale NaN and the values 0, so each of its elements is NaN for
//    whoever receives it. Then the residual of the whole piece is what it was before: a gradient scaler will skip the
//    step. As in topk.h the old residual goes where the gradient was.
//
// A message is
//
//   float32  scales[groups]
//   int8     values[count]
//
// Little-endian, nothing between, nothing behind, so of any alignment.
#pragma once
#include "device/codec.h"
#include "device/cpu.h"

namespace lightcc {

namespace kernels {
struct Int8Loops;
}

// Factors make a message 1/64 longer. Of normal sums the largest of 256 is 3.05 deviations, 2.82 of 128, 3.26 of 512:
// to halve the group would cost another 1/64 for an error that is 7 % smaller; to double it would gain half as much for
// one that is 7 % larger, and an outlier would coarsen twice as many. A block is whole groups.
inline constexpr size_t kInt8Group = 256;
static_assert(kCodecBlock % kInt8Group == 0);

size_t int8_message_bytes(size_t count);

struct Int8Piece {
  float* gradient;  // is overwritten
  float* residual;
  size_t count;
  float prescale = 1;
};

// One piece at a time, any number one after another; it has no memory of its own. The piece and the body are the
// caller's until step() has returned false. One thread at a time.
class Int8Encoding {
 public:
  explicit Int8Encoding(Isa isa = best_isa());

  // Does no work yet. `body` has room for int8_message_bytes(count).
  void start(const Int8Piece&, std::byte* body);

  // Takes at most a block of the piece (reads 512 KiB, writes that and 65 KiB). Returns whether there is more to do.
  bool step();

  bool finite() const { return finite_; }  // all sums; if not, the residual has not changed

 private:
  enum class Phase { encode, roll_back, done };

  void encode();
  void roll_back();

  const kernels::Int8Loops* loops_;
  Int8Piece piece_{};
  std::byte* body_ = nullptr;
  Phase phase_ = Phase::done;
  size_t block_ = 0;  // the next to encode or restore
  bool finite_ = true;
};

// A body from the network, which is the caller's and must stay. Nothing is believed: an Error{internal} says what is
// wrong. Any bits are a scale, and any byte is a value.
class Int8Message {
 public:
  Int8Message(ConstSpan body, size_t count, Isa isa = best_isa());

  size_t blocks() const { return blocks_of(count_); }
  // out[i] += value * scale for the elements of a block, rounded twice; `out` is the whole piece.
  void add_to(float* out, size_t block) const;

 private:
  const kernels::Int8Loops* loops_;
  const std::byte* body_;
  size_t count_;
};

}  // namespace lightcc
