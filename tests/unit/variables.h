// An environment that a test makes up.
#pragma once
#include <map>
#include <string>

#include "base/config.h"

namespace lightcc {

using Variables = std::map<std::string, std::string>;

inline Environment from(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

}  // namespace lightcc
