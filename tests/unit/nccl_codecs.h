// Compressed all-reduces of GPUs by NCCL, both doubles (gpu_codecs.h), beside the same ones of tensors of the CPU.
#pragma once
#include "unit/gpu_codecs.h"

namespace lightcc::test {

class NcclCodec : public GpuCodec {
 protected:
  NcclCodec() {
    config_.nccl = true;
    nccl_.set_kernels(2);
  }
  // Of three and more ranks a host: small multiples of 1/4, whose sums have the same bits in each order.
  static Floats quarters(int step, int rank, size_t tensor, size_t count) {
    Floats values = gradient(step, rank, tensor, count);
    for (float& value : values) value = std::round(value * 4) / 4;
    return values;
  }
  // Of every kind of part: a tensor whose shares are not equal, one whose are, several, one without elements.
  static std::vector<std::vector<size_t>> parts() { return {{1'050'001, 1 << 20, 5000, 33, 0}}; }
};

}  // namespace lightcc::test
