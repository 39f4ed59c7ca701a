// init's first half: finds the other ranks, learns who shares a host, and opens memory and links to all of them.
#pragma once
#include "base/config.h"
#include "net/launchers.h"
#include "net/peers.h"
#include "net/world.h"

namespace lightcc {

struct Joined {
  std::unique_ptr<Peers> peers;
  World world;          // with its local and cross numbers as they turned out
  Config config;        // with rank 0's values for what must be the same everywhere
  std::string how;      // "Open MPI, PMIx 4.2.2 at 10.0.0.1:4711": how the ranks met
};

// epoch counts the inits of this process. Throws what keeps the ranks apart, on every rank that came.
Joined join(const World&, const Config&, const Environment&, int epoch, uint64_t deadline_ns);
Joined join_at(const World&, const Config&, Meeting, int epoch, uint64_t deadline_ns);  // where the ranks know already

}  // namespace lightcc
