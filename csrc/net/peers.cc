#include "net/peers.h"

#include <sys/socket.h>

#include <algorithm>

namespace lightcc {

Peers::Peers(std::unique_ptr<LocalRanks> local_ranks)
    : local_ranks_(std::move(local_ranks)),
      topology_(Topology::one_host(local_ranks_->size())),
      rank_(local_ranks_->rank()) {
  for (int rank = 0; rank < local_ranks_->size(); ++rank) names_.push_back(local_ranks_->name(rank));
}

Peers::Peers(int rank, Topology topology, std::vector<std::string> names, std::unique_ptr<LocalRanks> local_ranks,
             std::unique_ptr<TcpTransport> tcp, std::unique_ptr<HeartbeatSocket> heartbeats)
    : local_ranks_(std::move(local_ranks)), topology_(std::move(topology)), rank_(rank), names_(std::move(names)),
      tcp_(std::move(tcp)), heartbeats_(std::move(heartbeats)) {}

ListenSockets open_listen_sockets(const Address& at, Ports ports) {
  for (int tries = 64;; --tries) {
    ListenSockets sockets{listen_on(at, ports), Fd()};
    const Address own = local_address(sockets.listener.get());
    sockets.heartbeats = Fd(socket(own.family(), SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int off = 0;
    if (own.family() == AF_INET6) setsockopt(sockets.heartbeats.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (sockets.heartbeats && bind(sockets.heartbeats.get(), own.get(), own.length()) == 0) return sockets;
    if (tries == 0 || (ports.first && own.port() == ports.last))
      throw system_error("opening UDP port " + std::to_string(own.port()) + " for heartbeats");
    if (ports.first) ports.first = own.port() + 1;
  }
}

std::unique_ptr<Peers> Peers::connected(const JobCredentials& credentials, int rank, const Topology& topology,
                                        const std::vector<Contact>& contacts, std::unique_ptr<LocalRanks> local_ranks,
                                        ListenSockets sockets, const Address& from) {
  std::vector<Address> addresses;
  std::vector<std::string> names;
  for (const Contact& contact : contacts) addresses.push_back(contact.address), names.push_back(contact.name);
  auto tcp = std::make_unique<TcpTransport>(credentials, rank, contacts, std::move(sockets.listener), from);
  auto heartbeats = std::make_unique<HeartbeatSocket>(credentials, rank, topology, addresses,
                                                      std::move(sockets.heartbeats), *local_ranks);
  tcp->set_liveness_check(
      [heartbeats = heartbeats.get()](int peer, uint64_t since) { return heartbeats->heard_since(peer, since); });
  return std::unique_ptr<Peers>(
      new Peers(rank, topology, names, std::move(local_ranks), std::move(tcp), std::move(heartbeats)));
}

std::optional<uint64_t> Peers::awake_ns_ago(int rank, uint64_t now) const {
  if (!is_local(rank)) return heartbeats_->awake_ns_ago(rank, now);
  const uint64_t awake = header(rank).awake_ns.load(std::memory_order_relaxed);
  return now - std::min(now, awake);
}

std::vector<std::unique_ptr<Peers>> Peers::threads(const std::vector<int>& ranks_of_hosts) {
  std::vector<int> leader;
  std::vector<std::unique_ptr<LocalRanks>> hosts;
  for (int ranks : ranks_of_hosts) {
    leader.insert(leader.end(), size_t(ranks), int(leader.size()));
    for (auto& host : LocalRanks::threads(ranks)) hosts.push_back(std::move(host));
  }
  std::vector<std::unique_ptr<Peers>> peers;
  if (ranks_of_hosts.size() == 1) {
    for (auto& host : hosts) peers.push_back(std::make_unique<Peers>(std::move(host)));
    return peers;
  }
  const Topology topology = Topology::by_leader(leader);
  const JobCredentials credentials{"threads", "1", "a secret", 0};
  std::vector<ListenSockets> all_sockets;
  std::vector<Contact> contacts;
  std::vector<std::string> names;
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    all_sockets.push_back(open_listen_sockets(Address::parse("127.0.0.1"), {}));
    names.push_back("rank " + std::to_string(rank) + " (a thread)");
    contacts.push_back({names.back(), local_address(all_sockets.back().listener.get())});
  }
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    ListenSockets& sockets = all_sockets[size_t(rank)];
    peers.push_back(
        connected(credentials, rank, topology, contacts, std::move(hosts[size_t(rank)]), std::move(sockets), {}));
  }
  return peers;
}

std::unique_ptr<Link> Peers::control_link(int group, int peer) {
  if (is_local(peer)) return local_ranks_->control_link(group, local_index(peer));
  return tcp_->link(serial(group), TcpTransport::kControl, peer);
}
std::unique_ptr<Link> Peers::data_link(int group, int peer) {
  if (is_local(peer)) return local_ranks_->data_link(group, local_index(peer));
  return tcp_->link(serial(group), 0, peer);
}
void Peers::reset_group(int group) {
  local_ranks_->reset_group(group);
  if (tcp_) tcp_->retire(serial(group));
  ++generation_[size_t(group)];
}

void Peers::flush_and_wake() {
  local_ranks_->wake_marked();
  if (tcp_) tcp_->flush();
}
bool Peers::become_poller(Sleeper who) {
  int holder = kNobody;
  if (poller_.compare_exchange_strong(holder, int(who))) return true;
  if (who == Sleeper::caller && holder == int(Sleeper::engine_thread)) local_ranks_->set_event();
  return false;
}
void Peers::wake_urgently(int peer) {
  if (is_local(peer)) local_ranks_->wake_urgently(local_index(peer));
}

}  // namespace lightcc
