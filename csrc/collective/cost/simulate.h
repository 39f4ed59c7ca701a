// How long an all-reduce takes, message by message: each rank goes through its rounds, a round ends when the rank's
// messages have left and those for it have come. Messages share memories, NICs and uplinks fairly (flows.h), and then
// take the path's latency: LogGP with the gap of whatever is shared. After Alexandrov et al., LogGP, 1997.
// For clusters of up to some thousand ranks; cost.h prices larger ones.
#pragma once
#include "collective/cost/cluster.h"
#include "collective/cost/traffic.h"

namespace lightcc {

// Seconds until the last rank is done. together: so many such all-reduces at a time, rank by rank alike, as 2D's lanes.
double simulate(const Traffic&, const Cluster&, double together = 1);

}  // namespace lightcc
