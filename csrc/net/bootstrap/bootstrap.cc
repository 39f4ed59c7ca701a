#include "net/bootstrap/bootstrap.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "base/log.h"
#include "base/wire.h"
#include "net/bootstrap/connect.h"
#include "net/bootstrap/exchange.h"
#include "net/bootstrap/launchers.h"
#include "net/bootstrap/local_exchange.h"

namespace lightcc {
namespace {

std::string name_of(const World& world) {
  return "rank " + std::to_string(world.rank) + " (pid " + std::to_string(getpid()) + ") on host " + world.host;
}

std::string socket_name_of(const std::string& job, int epoch) {
  return "lightcc/" + std::to_string(geteuid()) + "/" + std::to_string(std::hash<std::string>()(job)) + "/" +
         std::to_string(epoch);
}

// Ranks for which these are equal may share a host; whether they do, they try (find_leader). Neither alone is enough:
// cloned machines boot with one id, and containers of one machine have networks of their own.
std::string likely_host(const Config& config) {
  if (!config.host_id.empty()) return config.host_id;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat network {};
  stat("/proc/self/ns/net", &network);
  return boot + "/" + std::to_string(network.st_ino) + "/" + std::to_string(geteuid());
}

// The first rank that this one reaches on this host. presence_names: of the sockets by which each is found there.
int find_leader(int rank, const std::vector<std::string>& likely, const std::vector<std::string>& presence_names,
                const Deadline& deadline) {
  for (int other = 0; other < rank; ++other) {
    const bool may = likely[size_t(other)] == likely[size_t(rank)];
    if (may && is_reachable_locally(presence_names[size_t(other)], deadline)) return other;
  }
  return rank;
}

// Rank 0's settings hold, and it says who had others.
Config agree(const Config& own, int rank, const std::vector<std::string>& settings,
             const std::vector<std::string>& names) {
  if (rank == 0)
    for (size_t i = 1; i < settings.size(); ++i)
      if (const std::string differences = differing_settings(settings[0], settings[i]); !differences.empty())
        log(Level::warning, names[i] + " was started with other settings, rank 0's hold: " + differences);
  return with_settings(own, settings[0]);
}

void number_hosts(World& world, const Topology& topology) {
  const int host = topology.host_of[size_t(world.rank)];
  const int place = topology.local[size_t(world.rank)];
  world.local_rank = world.slot >= 0 ? world.slot : place;
  world.local_size = int(topology.hosts[size_t(host)].size());
  world.cross_rank = world.cross_size = 0;  // among the hosts that have this local rank
  for (int other = 0; other < int(topology.hosts.size()); ++other) {
    if (int(topology.hosts[size_t(other)].size()) <= place) continue;
    if (other < host) ++world.cross_rank;
    ++world.cross_size;
  }
}

Bootstrapped bootstrap_one_host(World world, const Config& config, const Epoch& epoch, const Deadline& deadline,
                                const std::optional<Error>& failure) {
  WireWriter note;
  note.put(std::string(LIGHTCC_VERSION)).put(shared_settings(config)).put(world.rank == 0 ? random_name() : "");
  // The name that everyone knows stays, for a rank that missed the epoch before.
  std::vector<std::string> socket_names{socket_name_of(world.job, epoch.number)};
  if (!epoch.socket_name.empty()) socket_names.insert(socket_names.begin(), epoch.socket_name);
  if (failure) {
    if (world.size > 1)
      open_local_exchange(socket_names, world.rank, world.size)->fail(*failure, deadline.cancellation);
    throw *failure;
  }
  auto local_ranks =
      connect_local_ranks(socket_names, world.rank, world.size, name_of(world), note.take(), deadline);
  std::vector<std::string> settings, names;
  std::string next_socket_name;
  for (int rank = 0; rank < world.size; ++rank) {
    WireReader reader(local_ranks->note(rank));
    if (const std::string version = reader.text(); version != LIGHTCC_VERSION)
      throw Error(Code::invalid_argument, "init: " + local_ranks->name(rank) + " runs lightcc " + version + ", rank " +
                                              std::to_string(world.rank) + " " LIGHTCC_VERSION);
    settings.push_back(reader.text());
    names.push_back(local_ranks->name(rank));
    if (rank == 0) next_socket_name = reader.text();
  }
  number_hosts(world, Topology::one_host(world.size));
  const Config agreed = agree(config, world.rank, settings, names);
  return {std::make_unique<Peers>(std::move(local_ranks)), std::move(world), agreed, "one host", next_socket_name};
}

class BootstrapSession {  // of one rank, where the ranks are on several hosts
 public:
  BootstrapSession(const World& world, const Config& config, Rendezvous rendezvous, int epoch,
                   const Deadline& deadline)
      : world_(world),
        config_(config),
        rendezvous_(std::move(rendezvous)),
        deadline_(deadline),
        credentials_{rendezvous_.job, LIGHTCC_VERSION, rendezvous_.secret, epoch},
        presence_name_(random_name()),
        presence_(listen_locally(presence_name_)),
        exchange_(open_exchange(world.rank, world.size, credentials_, rendezvous_.endpoints,
                                std::move(rendezvous_.listener))) {}

  Bootstrapped run(const std::optional<Error>& failure) {
    try {
      if (failure) throw *failure;
      return try_to_run();
    } catch (const Error& error) {
      exchange_->fail(error, deadline_.cancellation);
      throw;
    }
  }

 private:
  Bootstrapped try_to_run() {
    std::vector<Address> from;  // one a NIC
    if (!config_.iface.empty()) from = link_addresses(interfaces_of(config_), config_.iface);
    ListenSockets sockets = open_listen_sockets(any_address(), ports_of(config_));
    const int port = local_address(sockets.listener.get()).port();

    std::vector<std::string> likely, names, settings, presence_names, socket_names;
    std::optional<Nonce> nonce;  // rank 0's: of this epoch
    std::vector<int> ports, leaders;
    for (const std::string& note : exchange(WireWriter().put(likely_host(config_)).put(name_of(world_)).put(port).put(
             shared_settings(config_)).put(presence_name_).put(socket_name_).put(draw_nonce()))) {
      WireReader reader(note);
      likely.push_back(reader.text());
      names.push_back(reader.text());
      ports.push_back(reader.get<int>());
      settings.push_back(reader.text());
      presence_names.push_back(reader.text());
      socket_names.push_back(reader.text());
      if (!nonce) nonce = reader.bytes<sizeof(Nonce)>();
    }
    JobCredentials credentials = credentials_;
    credentials.nonce = *nonce;
    std::vector<std::string> own;
    for (const Address& nic : from) own.push_back(nic.text());
    if (own.empty() && exchange_->own_address()) own = {exchange_->own_address().text()};
    // Nobody came from elsewhere, so whoever shares rank 0's network is reached as rank 0 is.
    if (own.empty() && is_reachable_locally(presence_names[0], deadline_) && exchange_->root_address())
      own = {exchange_->root_address().text()};
    const int leader = find_leader(world_.rank, likely, presence_names, deadline_);
    // To a rank without an address nobody came from elsewhere, so all that are not on its host are so in name only.
    const Address at = Address::parse(own.empty() ? "127.0.0.1" : own[0]);
    const Config agreed_on = with_settings(config_, settings[0]);
    LinkNetwork network;
    if (agreed_on.net_plugin.empty() && agreed_on.net != "tcp") {
      const bool past_kernel = agreed_on.net == "xdp" && !at.is_loopback();  // within a machine there is no NIC
      const std::string port = past_kernel ? "xdp" : "udp";
      network.harp = open_harp(port, at, ports_of(config_), world_.rank, credentials_.epoch);
    }
    const std::string own_harp = network.harp ? network.harp->address() : "";
    std::vector<std::vector<Address>> addresses;
    std::vector<std::string> harp_addresses;
    for (const std::string& note : exchange(WireWriter().put(leader).put(own_harp).put(own))) {
      WireReader reader(note);
      leaders.push_back(reader.get<int>());
      harp_addresses.push_back(reader.text());
      auto& nics = addresses.emplace_back();
      for (uint32_t left = reader.length(sizeof(uint32_t)); left > 0; --left)
        nics.push_back(Address::parse(reader.text()));
    }
    const Topology topology = Topology::by_leader(leaders);
    const int host = topology.host_of[size_t(world_.rank)];
    std::vector<Contact> contacts;
    for (int rank = 0; rank < world_.size; ++rank) {
      // The way to rank 0's host is known, since this rank has gone it; to others it is as they say.
      const bool with_root = topology.share_host(rank, 0) && host != 0 && from.empty();
      std::vector<Address>& nics = addresses[size_t(rank)];
      if (with_root) nics = {exchange_->root_address()};
      if (nics.empty() && topology.host_of[size_t(rank)] != host)
        throw Error(Code::internal, "init: no address is known for " + names[size_t(rank)] + "; set LIGHTCC_IFACE");
      for (Address& nic : nics) nic = nic.with_port(ports[size_t(rank)]);
      contacts.push_back(contact_of(names[size_t(rank)], nics, harp_addresses[size_t(rank)]));
    }

    auto& on_this_host = topology.hosts[size_t(host)];
    auto local_ranks = connect_local_ranks({socket_names[size_t(leader)]}, topology.local[size_t(world_.rank)],
                                           int(on_this_host.size()), names[size_t(world_.rank)], "", deadline_);
    if (!agreed_on.net_plugin.empty() && topology.hosts.size() > 1)
      network.plugin = open_plugin(agreed_on.net_plugin, at, topology.local[size_t(world_.rank)]);
    exchange(WireWriter());  // everyone has come so far: from now on a rank that is not there is a loss
    number_hosts(world_, topology);
    std::string how = describe(rendezvous_, *exchange_);
    const Config agreed = agree(config_, world_.rank, settings, names);
    if (topology.hosts.size() == 1)
      return {std::make_unique<Peers>(std::move(local_ranks)), world_, agreed, how};
    auto peers = connect_peers(credentials, world_.rank, topology, contacts, std::move(local_ranks),
                               std::move(sockets), from, std::move(network));
    return {std::move(peers), world_, agreed, how};
  }

  std::vector<std::string> exchange(WireWriter& note) { return exchange_->exchange(note.take(), deadline_); }
  std::vector<std::string> exchange(WireWriter&& note) { return exchange(note); }

  World world_;
  const Config& config_;
  Rendezvous rendezvous_;
  const Deadline deadline_;
  const JobCredentials credentials_;
  const std::string presence_name_;  // of the socket by which ranks of this host find this one
  const std::string socket_name_ = random_name();  // of their LocalExchange if this one is the first of them
  const Fd presence_;
  std::unique_ptr<BootstrapExchange> exchange_;
};

}  // namespace

Bootstrapped bootstrap(const World& world, const Config& config, const Environment& env, const Epoch& epoch,
                       const Deadline& deadline, const std::optional<Error>& failure) {
  std::optional<Rendezvous> rendezvous;
  if (world.size > 1) rendezvous = find_rendezvous(world, config, env, epoch.number, deadline.ns);
  if (!rendezvous) return bootstrap_one_host(world, config, epoch, deadline, failure);
  return bootstrap_at(world, config, std::move(*rendezvous), epoch.number, deadline, failure);
}

Bootstrapped bootstrap_at(const World& world, const Config& config, Rendezvous rendezvous, int epoch,
                          const Deadline& deadline, const std::optional<Error>& failure) {
  return BootstrapSession(world, config, std::move(rendezvous), epoch, deadline).run(failure);
}

}  // namespace lightcc
