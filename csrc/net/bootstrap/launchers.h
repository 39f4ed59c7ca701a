// Where rank 0 listens while the ranks of several hosts bootstrap, by what the user or the launcher says: methods that
// are tried in order (docs/knobs.md).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "net/bootstrap/exchange.h"
#include "net/bootstrap/world.h"

namespace lightcc {

struct Rendezvous {
  std::string how;            // "Open MPI, PMIx 4.2.2", for messages
  std::string job, secret;    // the same on all ranks; for JobCredentials
  std::vector<Endpoint> endpoints;  // where rank 0's BootstrapExchange is reached, to be tried in order
  Fd listener;                // rank 0's
};

// None: the launcher says that all ranks are on one host, or does not say who shares one and no method fits, so
// that they are taken to be on one. Some methods exchange addresses through the launcher until the deadline; `epoch`
// counts the inits of this process. The environment gives what launchers set and the secret. Throws
// Error{invalid_argument} if a variable cannot be understood, or if the ranks are on several hosts and no method fits,
// with what would help; Error{timeout} or Error{internal} if the launcher's service fails.
std::optional<Rendezvous> find_rendezvous(const World&, const Config&, const Environment&, int epoch,
                                          uint64_t deadline_ns);

Ports ports_of(const Config&);                           // where to listen: LIGHTCC_PORT_RANGE
std::vector<Interface> interfaces_of(const Config&);     // what to use: LIGHTCC_IFACE

// The same where rank 0 tells the others by other means: it opens a rendezvous, and they know its endpoints as a text.
// The rest of the Rendezvous is for the caller to fill in.
Rendezvous open_rendezvous(const Config&, const World&);
std::string text_of(const std::vector<Endpoint>&);           // "10.0.0.1:4711,[fd00::1]:4711"
std::vector<Endpoint> parse_endpoints(const std::string& name, const std::string& list);  // name: whose, for the error

// The method that find_rendezvous takes: "address", "master", "PMI", "PMIx", "Slurm", or "" for none.
std::string rendezvous_method(const World&, const Config&, const Environment&);

// For --verbose: "Open MPI, PMIx 4.2.2 at 10.0.0.1:4711". From the BootstrapExchange's first exchange on.
std::string describe(const Rendezvous&, const BootstrapExchange&);

}  // namespace lightcc
