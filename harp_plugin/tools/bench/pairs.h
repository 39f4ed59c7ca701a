// Both sides in one thread, over mem: what an engine costs without a wire. Several pairs, each on a core of its own, as
// threads of one process or as processes, show whether engines get in each other's way.
#pragma once
#include <string>

#include "harp_plugin/tools/bench/settings.h"

namespace harp::bench {

std::string run_pairs(const Workload&);  // a line of JSON

}  // namespace harp::bench
