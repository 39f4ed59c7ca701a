// For tests of loops that have a variant for each instruction set.
#pragma once
#include <limits>
#include <vector>

#include "device/cpu.h"

namespace lightcc {

inline constexpr float kInfinite = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline std::vector<Isa> isas() {  // that this machine has
  std::vector<Isa> all;
  for (Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
    if (has(isa)) all.push_back(isa);
  return all;
}

}  // namespace lightcc
