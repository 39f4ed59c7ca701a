// What all groups of a rank share; it outlives them.
#pragma once
#include "engine/loop/progress_lock.h"
#include "engine/negotiate/surroundings.h"
#include "engine/run/run_resources.h"

namespace lightcc {

struct GroupResources : RunResources {
  const ProgressLock& progress_lock;
  Surroundings& surroundings;
};

}  // namespace lightcc
