#include "base/error.h"

#include "base/shortage.h"

namespace lightcc {
Error system_error(const std::string& attempted) {
  return Error(Code::internal, attempted + ": " + reason_of(errno));
}
}  // namespace lightcc
