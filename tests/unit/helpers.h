// Small things that many tests want.
#pragma once
#include <cstdint>
#include <regex>
#include <string>

#include "base/clock.h"

namespace lightcc {

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// A text without the seconds of a time-out, which are counted from when the rank that says it began to wait.
inline std::string without_seconds(const std::string& text) {
  return std::regex_replace(text, std::regex(R"(\([0-9.]+ s\))"), "(n s)");
}

inline uint64_t in_ms(uint64_t ms) { return now_ns() + ms * 1'000'000; }  // a deadline

}  // namespace lightcc
