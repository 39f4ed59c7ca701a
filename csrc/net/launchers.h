// Where the ranks of several hosts meet, by what the user or the launcher says: a ladder of steps (docs/knobs.md).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "net/store.h"
#include "net/world.h"

namespace lightcc {

struct Meeting {
  std::string how;            // "Open MPI, PMIx 4.2.2", for messages
  std::string job, secret;    // the same on all ranks; for Terms
  std::vector<Endpoint> places;  // where rank 0's Store is reached, to be tried in order
  Fd listener;                // rank 0's
};

// None: the launcher says that all ranks are on one host, or does not say who shares one and none of the steps fits, so
// that they are taken to be on one. Some steps exchange addresses through the launcher until the deadline; `epoch`
// counts the inits of this process. The environment gives what launchers set and the secret. Throws
// Error{invalid_argument} if a variable cannot be understood, or if the ranks are on several hosts and no step fits,
// with what would help; Error{timeout} or Error{internal} if the launcher's service fails.
std::optional<Meeting> find_meeting(const World&, const Config&, const Environment&, int epoch, uint64_t deadline_ns);

Ports ports_of(const Config&);                           // where to listen: LIGHTCC_PORT_RANGE
std::vector<Interface> interfaces_of(const Config&);     // what to use: LIGHTCC_IFACE

// The same where rank 0 tells the others by other means: it opens a meeting, and they know its endpoints as a text. The
// rest of the Meeting is for the caller to fill in.
Meeting open_meeting(const Config&, const World&);
std::string text_of(const std::vector<Endpoint>&);           // "10.0.0.1:4711,[fd00::1]:4711"
std::vector<Endpoint> parse_endpoints(const std::string& name, const std::string& list);  // name: whose, for the error

// The step of the ladder that find_meeting takes: "address", "master", "PMI", "PMIx", "Slurm", or "" for none.
std::string meeting_step(const World&, const Config&, const Environment&);

// For --verbose: "Open MPI, PMIx 4.2.2 at 10.0.0.1:4711". From the Store's first exchange on.
std::string describe(const Meeting&, const Store&);

}  // namespace lightcc
