// Calibration: where ranks are on several hosts, they measure what is between these (collective/network_probe.h), and
// the world's all-reduces are chosen by that (collective/cost_model_rules.h). What was measured of a set of hosts is
// kept for later runs.
#pragma once
#include <cstdint>

namespace lightcc {

class Cancellation;
class Engine;

// All ranks call it together, before they submit anything. Rank 0 says whether there is anything to measure, and which
// rules hold, so that all have the same. What could not be measured in time leaves the rules as they are; afterwards
// the engine's counters are zero. Throws only what ends the epoch: that another rank is gone, or that it was cancelled
// here or elsewhere.
inline constexpr uint64_t kCalibrationNs = 1'000'000'000;  // at most, or a little more
void calibrate(Engine&, const Cancellation* = nullptr, uint64_t longest_ns = kCalibrationNs);

}  // namespace lightcc
