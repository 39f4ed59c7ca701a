// The instruction sets that reduce() has loops for. reduce() takes the best one; tests compare them.
#pragma once
#include "device/device.h"

namespace lightcc {

enum class Isa { plain, avx2, avx512 };  // x86: avx2 with F16C; avx512 F, BW, VL and DQ

bool has(Isa);   // this machine
Isa best_isa();  // of this machine
const char* name_of(Isa);
void reduce_with(Isa, const Reduction&, std::span<void* const> out, std::span<const void* const> in, size_t count,
                 size_t streamed = 0);

}  // namespace lightcc
