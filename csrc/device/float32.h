// Tensors of other floating-point types as float32 and back.
#pragma once
#include <cstddef>

#include "base/types.h"

namespace lightcc {

// dtype: float16, bfloat16 or float32.
void to_float32(DType dtype, const void* from, float* to, size_t count);
void from_float32(DType dtype, const float* from, void* to, size_t count);  // rounds to nearest, ties to even

}  // namespace lightcc
