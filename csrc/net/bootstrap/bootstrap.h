// init's first half: finds the other ranks, learns who shares a host, and opens memory and links to all of them.
#pragma once
#include <optional>

#include "base/config.h"
#include "base/deadline.h"
#include "net/bootstrap/epoch.h"
#include "net/bootstrap/launchers.h"
#include "net/bootstrap/world.h"
#include "net/peers.h"

namespace lightcc {

struct Bootstrapped {
  std::unique_ptr<Peers> peers;
  World world;          // with its local and cross numbers as they turned out
  Config config;        // with rank 0's values for what must be the same everywhere
  std::string how;      // the ranks found each other: "Open MPI, PMIx 4.2.2 at 10.0.0.1:4711"
  std::string next_socket_name{};  // for the next Epoch
};

// Throws why the ranks cannot connect, on every rank that came, or why it was cancelled. What a launcher's service does
// before the ranks meet cannot be. failure: why this rank cannot go on; it is thrown once the others, which would wait,
// have been told.
Bootstrapped bootstrap(const World&, const Config&, const Environment&, const Epoch&, const Deadline&,
                       const std::optional<Error>& failure = {});
// The same where the ranks know the rendezvous already.
Bootstrapped bootstrap_at(const World&, const Config&, Rendezvous, int epoch, const Deadline&,
                          const std::optional<Error>& failure = {});

}  // namespace lightcc
