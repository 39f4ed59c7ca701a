// What the ranks have measured, and what follows for all-reduces of all of them (calibration.h).
#pragma once
#include <string>
#include <vector>

#include "collective/selector.h"
#include "engine/negotiate/control/plan.h"

namespace lightcc {

struct Calibrated {
  std::vector<Rule> rules;         // go before the others
  PlanCosts costs;                 // of what is chosen by them
  std::string network;             // JSON, with the keys of a cluster file (docs/explain.md)
};

}  // namespace lightcc
