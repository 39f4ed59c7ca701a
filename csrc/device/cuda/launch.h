// What kernels and those that launch them agree on.
#pragma once
#include <cstddef>

namespace lightcc {

constexpr unsigned kThreads = 256;  // of a block
// Some times as many as run there at once, so that multiprocessors that are ahead get more; of large tensors each takes
// many vectors.
constexpr size_t kBlocksPerMultiprocessor = 32;

}  // namespace lightcc
