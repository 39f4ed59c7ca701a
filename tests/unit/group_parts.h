// What the group engines of one rank stand on, without the engine around them.
#pragma once
#include <memory>
#include <utility>

#include "engine/negotiate/group_engine.h"
#include "engine/timeline/trace.h"

namespace lightcc::test {

struct GroupParts {
  explicit GroupParts(std::unique_ptr<Peers> p, Config c = {}) : peers(std::move(p)), config(std::move(c)) {}

  const std::unique_ptr<Peers> peers;
  const Config config;
  Counters counters;
  Timeline timeline;
  Tracing tracing{timeline};
  ProgressLock lock;
  NcclLaunches launches;
  Effects effects;
  Surroundings surroundings;
  const GroupResources shared{{*peers, config, std::make_shared<OutputPool>(1 << 20, 1'000'000'000),
                               std::make_shared<PinnedPool>(peers->arena(), 1 << 20), counters, tracing, launches,
                               surroundings.groups, effects},
                              lock, surroundings};
};

}  // namespace lightcc::test
