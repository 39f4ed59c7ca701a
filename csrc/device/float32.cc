#include "device/float32.h"

#include <cstring>

#include "device/half.h"

namespace lightcc {

void to_float32(DType dtype, const void* from, float* to, size_t count) {
  const auto* shorts = static_cast<const uint16_t*>(from);
  if (dtype == DType::float32) std::memcpy(to, from, count * sizeof(float));
  else if (dtype == DType::float16) for (size_t i = 0; i < count; ++i) to[i] = float_of_float16(shorts[i]);
  else for (size_t i = 0; i < count; ++i) to[i] = float_of_bfloat16(shorts[i]);
}

void from_float32(DType dtype, const float* from, void* to, size_t count) {
  auto* shorts = static_cast<uint16_t*>(to);
  if (dtype == DType::float32) std::memcpy(to, from, count * sizeof(float));
  else if (dtype == DType::float16) for (size_t i = 0; i < count; ++i) shorts[i] = float16_of_float(from[i]);
  else for (size_t i = 0; i < count; ++i) shorts[i] = bfloat16_of_float(from[i]);
}

}  // namespace lightcc
