// What the groups of a rank know of each other. It outlives them.
#pragma once
#include "engine/negotiate/control/deadlock_detector.h"
#include "engine/request/group_table.h"

namespace lightcc {

struct Surroundings {
  GroupTable groups;            // of this rank; any thread
  DeadlockDetector deadlocks{[this](int rank, int group) {  // which learns something on the world's coordinator only
    const auto found = groups.find(group);
    return found && found->contains(rank);
  }};
};

}  // namespace lightcc
