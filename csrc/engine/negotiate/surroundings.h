// What a group's engine may ask about the rest of its rank's engine. It outlives the group's.
#pragma once
#include "engine/negotiate/control/deadlock_detector.h"
#include "engine/request/group_table.h"

namespace lightcc {

struct Surroundings {
  const GroupTable& groups;            // of this rank
  const DeadlockDetector& deadlocks;   // which knows something on the world's coordinator only
};

}  // namespace lightcc
