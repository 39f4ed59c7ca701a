// What one rank can know to be wrong about its own request, before anything is sent, and about the answer to it.
#pragma once
#include <span>

#include "engine/request/request.h"
#include "net/group.h"

namespace lightcc {

// group: the request's, nullptr if there is none; rank: this one. Completes the splits of an alltoall that has
// none. Throws Error{invalid_argument} naming tensor, rank and what to do.
void validate(Request&, const Group*, int rank);

// The rows that the coordinator tells each member belong to what this one, member `index` of `members`, has announced;
// absent: this one has joined. Throws Error{internal}: a message was damaged.
void validate_rows(const Response&, const Announcement&, int index, int members, bool absent);

}  // namespace lightcc
