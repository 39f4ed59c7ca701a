// Calibration: where ranks are on several hosts, they measure what is between these (collective/network_probe.h), and
// the world's all-reduces are chosen by that (collective/priced_rules.h). What was measured of a set of hosts is kept
// for later runs.
#pragma once
#include "base/deadline.h"
#include "engine/engine.h"

namespace lightcc {

// All ranks call it together, before they submit anything. Rank 0 says whether there is anything to measure, and which
// rules hold, so that all have the same. Takes at most about a second; what could not be measured leaves the rules as
// they are. Throws only what ends the epoch: that another rank is gone, or that it was cancelled here or elsewhere.
void calibrate(Engine&, const Cancellation* = nullptr);

}  // namespace lightcc
