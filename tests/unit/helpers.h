// Small things that many tests want.
#pragma once
#include <cstdint>
#include <string>

#include "base/clock.h"

namespace lightcc {

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

inline uint64_t in_ms(uint64_t ms) { return now_ns() + ms * 1'000'000; }  // a deadline

}  // namespace lightcc
