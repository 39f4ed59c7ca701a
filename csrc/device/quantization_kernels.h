// The loops behind QuantizedEncoding and QuantizedMessage, one of each for a format and an instruction set. All
// instruction sets give the same bits.
#pragma once
#include "device/quantization.h"

namespace lightcc::kernels {

// At most a block of a piece, from the border of a group on.
struct QuantizationTask {
  float* residual;
  float* gradient;  // becomes the old residual
  float prescale;
  size_t count;
  std::byte* scales;  // of these groups
  std::byte* values;
};

struct QuantizationLoops {
  bool (*encode)(const QuantizationTask&);  // are all sums finite? where not, the residual has not changed
  void (*add)(float* out, size_t count, const std::byte* scales, const std::byte* values);
};
template <class Format> const QuantizationLoops& quantization_loops(Isa);

}  // namespace lightcc::kernels
