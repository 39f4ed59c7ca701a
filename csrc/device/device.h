// Arithmetic and copies on payload. The only place that touches payload bytes, so what is copied is counted.
// Pointers may be unaligned to anything but the element. Inputs and outputs may be the same memory
// (element i of every output depends on element i of the inputs only), but may not overlap shifted.
#pragma once
#include "base/types.h"

namespace lightcc {

// out[k][i] = round(post * op_j(pre * in[j][i])) for every output k: every input read once, every output
// written once. op is sum, min, max or product. float16 and bfloat16 accumulate in float32 and round
// once; float32 and float64 in their own precision; inputs combine in the order given, so equal inputs
// give equal bits. bool: sum and max are "or", product and min "and". For integers a factor other than
// 1 is applied in double and truncated towards zero.
struct Reduction {
  DType dtype;
  ReduceOp op;
  double pre = 1.0, post = 1.0;
};

// The first `streamed` outputs are written past the cache, in whole lines: for outputs that are not inputs and that the
// last-level cache will not keep anyway (see outgrows_cache). What the caller later tells other threads or processes
// in the usual way (release and acquire) includes them.
void reduce(const Reduction&, std::span<void* const> out, std::span<const void* const> in, size_t count,
            size_t streamed = 0);

// Fills with the number that changes no result of the reduction when it is one input among others: 0 for sum, average
// and adasum; for product 1, which needs pre to be 1; for min and max the last in order.
void fill_neutral(const Reduction&, void* out, size_t count);

void copy(void* to, const void* from, size_t bytes, bool streamed = false);
// The same between payload and the memory of a link, counted apart.
void stage(void* to, const void* from, size_t bytes, bool streamed = false);
void count_staged(size_t bytes);  // that somebody else has copied

// Whether outputs of `bytes`, those of all ranks that work at the same time on this host, are more than the
// last-level cache will keep (half of it, what they came from needing the rest), so that streaming them pays.
bool outgrows_cache(size_t bytes);

// The payload bytes that copy() and stage() have moved in this process so far.
uint64_t copied_bytes();
uint64_t staged_bytes();

}  // namespace lightcc
