// Opens what ranks that know of each other need: memory that those of a host share, sockets, transports and heartbeats.
// The one place that knows which transports there are.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/address.h"
#include "net/handshake.h"
#include "net/harp/harp_transport.h"
#include "net/peers.h"
#include "net/plugin/plugin_device.h"

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

// For LIGHTCC_NET=harp and xdp; port: HARP's; at: the address of a NIC. Throws Error{internal} where HARP cannot.
std::unique_ptr<HarpTransport> open_harp(const std::string& port, const Address& at, Ports, int rank, int epoch);
// For LIGHTCC_NET_PLUGIN=name. The device that is called as the NIC at this address, or else one by the rank's number
// on its host.
std::unique_ptr<PluginDevice> open_plugin(const std::string& name, const Address& at, int local_rank);

struct LinkNetwork {           // what carries links between hosts; neither: TCP
  std::unique_ptr<HarpTransport> harp{};
  std::unique_ptr<PluginDevice> plugin{};
};

// A rank's contact, given where it listens, one address a NIC; none: it is not to be reached from elsewhere. harp: as
// its HarpTransport says, or "".
Contact contact_of(const std::string& name, const std::vector<Address>& listens_at, const std::string& harp = "");
// contacts: of all ranks; those of this host are not connected to. from: where connections of TCP start, one address a
// NIC; empty: wherever the system has them start. Heartbeats take the first NIC.
std::unique_ptr<Peers> connect_peers(const JobCredentials&, int rank, const Topology&, std::vector<Contact>,
                                     std::unique_ptr<LocalRanks>, ListenSockets, std::vector<Address> from,
                                     LinkNetwork = {});

}  // namespace lightcc
