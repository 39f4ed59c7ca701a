// Ranks that are threads of one process, on one host or on emulated ones.
#pragma once
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "net/bootstrap/connect.h"
#include "net/loop/loop.h"

namespace lightcc::test {

struct ThreadHosts {           // hosts of so many ranks each
  explicit ThreadHosts(const std::vector<int>& ranks_of_hosts) {
    std::vector<int> leader;
    for (int ranks : ranks_of_hosts) {
      leader.insert(leader.end(), size_t(ranks), int(leader.size()));
      for (auto& rank : LocalRanks::threads(ranks)) local_ranks.push_back(std::move(rank));
    }
    topology = Topology::by_leader(leader);
    for (size_t rank = 0; rank < local_ranks.size(); ++rank)
      names.push_back("rank " + std::to_string(rank) + " (a thread)");
  }
  int size() const { return topology.ranks(); }
  std::vector<std::unique_ptr<LocalRanks>> local_ranks;  // by world rank
  Topology topology;
  std::vector<std::string> names;
};

// TCP over loopback, or HARP (LIGHTCC_TEST_NET=harp), or a network plugin (its path), and heartbeats between the hosts.
inline std::vector<std::unique_ptr<Peers>> thread_peers(const std::vector<int>& ranks_of_hosts) {
  ThreadHosts hosts(ranks_of_hosts);
  std::vector<std::unique_ptr<Peers>> peers;
  if (ranks_of_hosts.size() == 1) {
    for (auto& rank : hosts.local_ranks) peers.push_back(std::make_unique<Peers>(std::move(rank)));
    return peers;
  }
  const JobCredentials credentials{"threads", "1", "a secret of process " + std::to_string(getpid()), 0};
  const Address loopback = Address::parse("127.0.0.1");
  const char* given = std::getenv("LIGHTCC_TEST_NET");
  const std::string net = given ? given : "";
  std::vector<LinkNetwork> networks(hosts.names.size());
  std::vector<ListenSockets> sockets;
  std::vector<Contact> contacts;
  for (size_t rank = 0; rank < hosts.names.size(); ++rank) {
    LinkNetwork& network = networks[rank];
    if (net == "harp") network.harp = open_harp("udp", loopback, {}, int(rank), 0);
    else if (!net.empty()) network.plugin = open_plugin(net, loopback, int(rank));
    sockets.push_back(open_listen_sockets(loopback, {}));
    contacts.push_back(contact_of(hosts.names[rank], {local_address(sockets.back().listener.get())},
                                  network.harp ? network.harp->address() : ""));
  }
  for (size_t rank = 0; rank < hosts.names.size(); ++rank)
    peers.push_back(connect_peers(credentials, int(rank), hosts.topology, contacts,
                                  std::move(hosts.local_ranks[rank]), std::move(sockets[rank]), {},
                                  std::move(networks[rank])));
  return peers;
}

// The network given between the hosts, and no heartbeats.
inline std::vector<std::unique_ptr<Peers>> thread_peers(const std::vector<int>& ranks_of_hosts, LoopNetwork& network) {
  ThreadHosts hosts(ranks_of_hosts);
  std::vector<Contact> contacts;
  for (const std::string& name : hosts.names) contacts.push_back({name, {{"loop", ""}}});
  std::vector<std::unique_ptr<Peers>> peers;
  for (int rank = 0; rank < hosts.size(); ++rank) {
    std::vector<NamedTransport> transports;
    transports.push_back({"loop", network.transport(rank)});
    peers.push_back(std::make_unique<Peers>(rank, hosts.topology, contacts,
                                            std::move(hosts.local_ranks[size_t(rank)]), std::move(transports),
                                            nullptr));
  }
  return peers;
}

}  // namespace lightcc::test
