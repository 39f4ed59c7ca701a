#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace lightcc {
Error system_error(const std::string& attempted) {
  return Error(Code::internal, attempted + ": " + std::strerror(errno));
}
}  // namespace lightcc
