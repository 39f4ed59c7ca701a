// The instruction sets that reduce() has loops for. reduce() takes the best one; tests compare them.
#pragma once
#include "device/device.h"

namespace lightcc {

enum class Isa { plain, avx2 };  // avx2: x86 with AVX2 and F16C

Isa best_isa();  // of this machine
void reduce_with(Isa, const Reduction&, std::span<void* const> out, std::span<const void* const> in, size_t count);

}  // namespace lightcc
