// The loops behind Int8Encoding and Int8Message, one of each for an instruction set. All give the same bits.
#pragma once
#include "device/int8.h"

namespace lightcc::kernels {

// At most a block of a piece, from the border of a group on.
struct Int8Task {
  float* residual;
  float* gradient;  // becomes the old residual
  float prescale;
  size_t count;
  std::byte* scales;  // of these groups
  std::byte* values;
};

struct Int8Loops {
  bool (*encode)(const Int8Task&);  // returns whether all sums are finite; where not, the residual has not changed
  void (*add)(float* out, size_t count, const std::byte* scales, const std::byte* values);
};
const Int8Loops& int8_loops(Isa);

}  // namespace lightcc::kernels
