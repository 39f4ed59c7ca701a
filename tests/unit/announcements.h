// What ranks announce to the coordinator, in tests of the control plane.
#pragma once
#include "engine/negotiate/control/message.h"

namespace lightcc::test {

inline Announcement allreduce(int64_t count, DType dtype = DType::float32) {
  Announcement what;
  what.kind = Kind::allreduce, what.tensors = {{dtype, {count}}};
  return what;
}

inline Announcement joining() {
  Announcement what;
  what.kind = Kind::join;
  return what;
}

}  // namespace lightcc::test
