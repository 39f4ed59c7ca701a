// What one rank can know to be wrong about its own request, before anything is sent, and about the answer to it.
#pragma once
#include "engine/request.h"

namespace lightcc {

// ranks: the request's group, empty if there is none; rank: this one. Completes the splits of an alltoall that has
// none. Throws Error{invalid_argument} naming tensor, rank and what to do.
void check(Request&, const std::vector<int>& ranks, int rank);

// The rows that the coordinator tells each member belong to what this one, member `index` of `members`, has announced;
// absent: this one has joined. Throws Error{internal}: a message was damaged.
void check_rows(const Item&, const Announcement&, int index, int members, bool absent);

}  // namespace lightcc
