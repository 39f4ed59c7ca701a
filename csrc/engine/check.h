// What one rank can know to be wrong about its own request, before anything is sent.
#pragma once
#include "engine/request.h"

namespace lightcc {

// ranks: the request's group, empty if there is none; rank: this one. Completes the splits of an alltoall that has
// none. Throws Error{invalid_argument} naming tensor, rank and what to do.
void check(Request&, const std::vector<int>& ranks, int rank);

}  // namespace lightcc
