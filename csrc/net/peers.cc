#include "net/peers.h"

#include <sys/socket.h>

#include <algorithm>

namespace lightcc {

Peers::Peers(std::unique_ptr<Host> host)
    : host_(std::move(host)), topology_(Topology::one_host(host_->size())), rank_(host_->rank()) {
  for (int rank = 0; rank < host_->size(); ++rank) names_.push_back(host_->name(rank));
}

Peers::Peers(int rank, Topology topology, std::vector<std::string> names, std::unique_ptr<Host> host,
             std::unique_ptr<Network> network, std::unique_ptr<Heart> heart)
    : host_(std::move(host)), topology_(std::move(topology)), rank_(rank), names_(std::move(names)),
      network_(std::move(network)), heart_(std::move(heart)) {}

Door open_door(const Address& at, Ports ports) {
  for (int tries = 64;; --tries) {
    Door door{listen_on(at, ports), Fd()};
    const Address own = local_address(door.listener.get());
    door.beats = Fd(socket(own.family(), SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int off = 0;
    if (own.family() == AF_INET6) setsockopt(door.beats.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (door.beats && bind(door.beats.get(), own.get(), own.length()) == 0) return door;
    if (tries == 0 || (ports.first && own.port() == ports.last))
      throw system_error("opening UDP port " + std::to_string(own.port()) + " for heartbeats");
    if (ports.first) ports.first = own.port() + 1;
  }
}

std::unique_ptr<Peers> Peers::connected(const Terms& terms, int rank, const Topology& topology,
                                        const std::vector<Contact>& contacts, std::unique_ptr<Host> host, Door door,
                                        const Address& from) {
  std::vector<Address> addresses;
  std::vector<std::string> names;
  for (const Contact& contact : contacts) addresses.push_back(contact.address), names.push_back(contact.name);
  auto network = std::make_unique<Network>(terms, rank, contacts, std::move(door.listener), from);
  auto heart = std::make_unique<Heart>(terms, rank, topology, addresses, std::move(door.beats), *host);
  network->listen_to([heart = heart.get()](int peer, uint64_t since) { return heart->heard_since(peer, since); });
  return std::unique_ptr<Peers>(
      new Peers(rank, topology, names, std::move(host), std::move(network), std::move(heart)));
}

std::optional<uint64_t> Peers::awake_ns_ago(int rank, uint64_t now) const {
  if (!here(rank)) return heart_->awake_ns_ago(rank, now);
  const uint64_t awake = header(rank).awake_ns.load(std::memory_order_relaxed);
  return now - std::min(now, awake);
}

std::vector<std::unique_ptr<Peers>> Peers::threads(const std::vector<int>& ranks_of_hosts) {
  std::vector<int> leader;
  std::vector<std::unique_ptr<Host>> hosts;
  for (int ranks : ranks_of_hosts) {
    leader.insert(leader.end(), size_t(ranks), int(leader.size()));
    for (auto& host : Host::threads(ranks)) hosts.push_back(std::move(host));
  }
  std::vector<std::unique_ptr<Peers>> peers;
  if (ranks_of_hosts.size() == 1) {
    for (auto& host : hosts) peers.push_back(std::make_unique<Peers>(std::move(host)));
    return peers;
  }
  const Topology topology = Topology::by_leader(leader);
  const Terms terms{"threads", "1", "a secret", 0};
  std::vector<Door> doors;
  std::vector<Contact> contacts;
  std::vector<std::string> names;
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    doors.push_back(open_door(Address::parse("127.0.0.1"), {}));
    names.push_back("rank " + std::to_string(rank) + " (a thread)");
    contacts.push_back({names.back(), local_address(doors.back().listener.get())});
  }
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    Door& door = doors[size_t(rank)];
    peers.push_back(connected(terms, rank, topology, contacts, std::move(hosts[size_t(rank)]), std::move(door), {}));
  }
  return peers;
}

bool Peers::all_here(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return here(rank); });
}

std::vector<int> Peers::local(const std::vector<int>& ranks) const {
  std::vector<int> locals;
  for (int rank : ranks) locals.push_back(local(rank));
  return locals;
}

std::unique_ptr<Link> Peers::control_link(int group, int peer) {
  if (here(peer)) return host_->control_link(group, local(peer));
  return network_->link(serial(group), Network::kControl, peer);
}
std::unique_ptr<Link> Peers::data_link(int group, int peer) {
  if (here(peer)) return host_->data_link(group, local(peer));
  return network_->link(serial(group), 0, peer);
}
void Peers::reset_group(int group) {
  host_->reset_group(group);
  if (network_) network_->retire(serial(group));
  ++generation_[size_t(group)];
}

void Peers::ring_marked() {
  host_->ring_marked();
  if (network_) network_->flush();
}
void Peers::ring_urgently(int peer) {
  if (here(peer)) host_->ring_urgently(local(peer));
}

}  // namespace lightcc
