// Opens what ranks that know of each other need: memory that those of a host share, sockets, transports and heartbeats.
// The one place that knows which transports there are.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/address.h"
#include "net/handshake.h"
#include "net/peers.h"

namespace lightcc {

// Exchanges memory with the other ranks of this host, which give the same names (local_exchange.h). All of them
// succeed, or each throws why one could not, or why it was cancelled.
std::unique_ptr<LocalRanks> connect_local_ranks(const std::vector<std::string>& socket_names, int rank, int size,
                                                const std::string& name, const std::string& note,
                                                const Deadline&);

struct ListenSockets {         // for ranks of other hosts: one port, TCP for links, UDP for heartbeats
  Fd listener, heartbeats;
};
ListenSockets open_listen_sockets(const Address& at, Ports);

// A rank's contact, given where it listens, one address a NIC; none: it is not to be reached from elsewhere.
Contact contact_of(const std::string& name, const std::vector<Address>& listens_at);
// contacts: of all ranks; those of this host are not connected to. from: where connections start, one address a NIC;
// empty: wherever the system has them start. Heartbeats take the first NIC.
std::unique_ptr<Peers> connect_peers(const JobCredentials&, int rank, const Topology&, const std::vector<Contact>&,
                                     std::unique_ptr<LocalRanks>, ListenSockets, std::vector<Address> from);

}  // namespace lightcc
