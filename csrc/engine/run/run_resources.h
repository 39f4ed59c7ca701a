// What the batch queues of all groups of a rank share; it outlives them.
#pragma once
#include <memory>

#include "base/config.h"
#include "engine/request/effects.h"
#include "engine/request/group_table.h"
#include "engine/run/nccl_launches.h"
#include "engine/run/pinned_pool.h"
#include "engine/run/tracing.h"
#include "engine/timeline/counters.h"
#include "net/peers.h"

namespace lightcc {

struct RunResources {
  Peers& peers;
  const Config& config;
  std::shared_ptr<OutputPool> outputs;
  std::shared_ptr<PinnedPool> pinned;
  Counters& counters;
  Tracing& tracing;
  NcclLaunches& launches;
  const GroupTable& groups;
  Effects& effects;
};

}  // namespace lightcc
