#include "net/bootstrap/connect.h"

#include <sys/random.h>
#include <sys/socket.h>

#include "base/cores.h"
#include "base/wire.h"
#include "net/bootstrap/local_exchange.h"
#include "net/health/process_watch.h"
#include "net/plugin/plugin_transport.h"
#include "net/tcp/tcp_transport.h"

namespace lightcc {
namespace {

const std::string kTcp = "tcp", kHarp = "harp", kPlugin = "plugin";
// Heartbeats and TCP find out who is lost. A stopped process is not lost, until this.
constexpr uint32_t kHarpSilenceMs = 600'000;

std::unique_ptr<LocalRanks> share_memory(LocalExchange& exchange, int rank, int size, const std::string& name,
                                         const std::string& note, const Deadline& deadline) {
  auto own = LocalRanks::create_arena(size);
  uint64_t& own_nonce = reinterpret_cast<Header*>(own->base())->nonce;
  if (getrandom(&own_nonce, sizeof own_nonce, 0) != sizeof own_nonce) throw system_error("drawing a nonce");
  RankInfo info{WireWriter().put(own_nonce).put(name).put(note).put(bitmap_of(bound_to())).take(), {}};
  info.fds.push_back(duplicate(own->memfd()));
  info.fds.push_back(ProcessWatch::own_pidfd());
  info.fds.push_back(new_event());
  own->close_memfd();
  auto infos = exchange.exchange(std::move(info), deadline);

  std::vector<LocalRank> ranks;
  std::vector<Fd> pidfds(static_cast<size_t>(size));
  CoreBitmap cores;
  for (int other = 0; other < size; ++other) {
    RankInfo& theirs = infos[size_t(other)];
    if (theirs.fds.size() != 3) WireReader::fail();
    WireReader reader(theirs.note);
    const auto nonce = reader.get<uint64_t>();
    LocalRank one{reader.text(), reader.text(), own, std::move(theirs.fds[2])};
    cores = together(std::move(cores), reader.values<uint64_t>());
    if (other != rank) {
      one.arena = LocalRanks::map_arena(theirs.fds[0].get(), size);
      one.arena->close_memfd();
      one.arena->no_copy_in_child();  // a forked child keeps its own memory, where tensors may lie, and no peer's
      pidfds[size_t(other)] = std::move(theirs.fds[1]);
    }
    if (reinterpret_cast<Header*>(one.arena->base())->nonce != nonce)
      throw Error(Code::internal, "init: " + one.name + " does not share memory with this rank");
    ranks.push_back(std::move(one));
  }
  return std::make_unique<LocalRanks>(rank, std::move(ranks), std::move(pidfds), within_quota(count_of(cores)));
}

}  // namespace

std::unique_ptr<LocalRanks> connect_local_ranks(const std::vector<std::string>& socket_names, int rank, int size,
                                                const std::string& name, const std::string& note,
                                                const Deadline& deadline) {
  const auto exchange = open_local_exchange(socket_names, rank, size);
  try {
    auto local_ranks = share_memory(*exchange, rank, size, name, note, deadline);
    exchange->exchange({}, deadline);  // all map all memory: from now on a rank that is not there is a loss
    return local_ranks;
  } catch (const Error& error) {
    exchange->fail(error, deadline.cancellation);
    throw;
  }
}

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

std::unique_ptr<HarpTransport> open_harp(const std::string& port, const Address& at, Ports ports, int rank, int epoch) {
  const std::string range = ports.first ? std::to_string(ports.first) + "-" + std::to_string(ports.last) : "";
  const HarpOptions options{.port = port,
                            .interface = at.with_port(0).text(),
                            .port_range = range,
                            .peer_timeout_ms = kHarpSilenceMs};
  return std::make_unique<HarpTransport>(options, rank, uint64_t(epoch));
}

std::unique_ptr<PluginDevice> open_plugin(const std::string& name, const Address& at, int local_rank) {
  PluginOptions options{.name = name, .index = local_rank};
  for (const Interface& one : interfaces())
    if (one.address.same_host(at)) options.interface = one.name;
  return std::make_unique<PluginDevice>(options);
}

Contact contact_of(const std::string& name, const std::vector<Address>& listens_at, const std::string& harp) {
  Contact contact{name};
  for (const Address& address : listens_at) contact.addresses.push_back({kTcp, address.text()});
  if (!harp.empty()) contact.addresses.push_back({kHarp, harp});
  return contact;
}

std::unique_ptr<Peers> connect_peers(const JobCredentials& credentials, int rank, const Topology& topology,
                                     std::vector<Contact> contacts, std::unique_ptr<LocalRanks> local_ranks,
                                     ListenSockets sockets, std::vector<Address> from, LinkNetwork network) {
  std::vector<TcpPeer> tcp_peers;
  std::vector<HarpPeer> harp_peers;
  std::vector<std::string> names;
  std::vector<Address> heartbeat_addresses;  // the ports are the same
  for (Contact& contact : contacts) {
    names.push_back(contact.name);
    TcpPeer& peer = tcp_peers.emplace_back(TcpPeer{contact.name, {}});
    for (const NamedAddress& one : contact.addresses)
      if (one.transport == kTcp) peer.addresses.push_back(Address::parse(one.address));
    heartbeat_addresses.push_back(peer.addresses.empty() ? Address() : peer.addresses[0]);
    const std::string* at = contact.address(kHarp);
    harp_peers.push_back({contact.name, at ? *at : ""});
    if (network.plugin) contact.addresses.push_back({kPlugin, ""});
  }
  auto probes = std::make_unique<TcpProbes>(credentials, rank, heartbeat_addresses, from.empty() ? Address() : from[0]);
  auto heartbeats = std::make_unique<HeartbeatSocket>(credentials, rank, topology, std::move(heartbeat_addresses),
                                                      std::move(sockets.heartbeats), *local_ranks, std::move(probes));
  auto tcp = std::make_unique<TcpTransport>(credentials, rank, std::move(tcp_peers), std::move(sockets.listener),
                                            std::move(from));
  tcp->set_liveness_check(
      [heartbeats = heartbeats.get()](int peer, uint64_t since) { return heartbeats->heard_since(peer, since); });
  std::vector<NamedTransport> transports;
  if (network.plugin) {
    transports.push_back(
        {kPlugin, std::make_unique<PluginTransport>(std::move(network.plugin), rank, names, std::move(tcp))});
  } else if (network.harp) {
    network.harp->set_peers(std::move(harp_peers));
    // Two ranks that use a link have a TCP connection as well, which carries nothing: the kernel of a host tells by it
    // that a process has died. The higher rank connects.
    network.harp->set_watch([tcp = tcp.get()](int peer) { tcp->link(0, Transport::kControl, peer)->peek(1); });
    transports.push_back({kHarp, std::move(network.harp)});
    transports.push_back({.name = kTcp, .transport = std::move(tcp), .only_watches = true});
  } else {
    transports.push_back({kTcp, std::move(tcp)});
  }
  return std::make_unique<Peers>(rank, topology, contacts, std::move(local_ranks), std::move(transports),
                                 std::move(heartbeats));
}

}  // namespace lightcc
