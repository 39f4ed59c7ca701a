// All-gather and reduce-scatter for groups on several hosts, of any numbers of members: rows of algorithms.h.
//
// 1. What belongs to a member passes between its host and another as one message, between the member and its
//    counterpart there. The counterparts of a host's members are spread evenly over the other host.
// 2. So each byte enters, or leaves, a host once, and all members of a host share that work.
// 3. All members make the same rounds, and what one sends in a round the other receives in the same: no step waits for
//    a buffer.
#pragma once
#include "collective/collective.h"
#include "collective/hosts.h"
#include "collective/schedule.h"

namespace lightcc {

Schedule allgather_by_host(const Collective&, const Hosts&);
Schedule reducescatter_by_host(const Collective&, const Hosts&);

}  // namespace lightcc
