// Broadcasts, which are trees: rows of algorithms.h.
#pragma once
#include "collective/collective.h"
#include "collective/hosts.h"
#include "collective/schedule.h"

namespace lightcc {

Schedule broadcast_binomial(const Collective&, const Hosts&);  // over ranks, wherever they are
Schedule broadcast_by_host(const Collective&, const Hosts&);   // into each host once

}  // namespace lightcc
