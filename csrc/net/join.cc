#include "net/join.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <functional>

#include "base/log.h"
#include "base/wire.h"
#include "net/launchers.h"
#include "net/rendezvous.h"
#include "net/store.h"

namespace lightcc {
namespace {

std::string name_of(const World& world) {
  return "rank " + std::to_string(world.rank) + " (pid " + std::to_string(getpid()) + ") on host " + world.host;
}

std::string place_of(const std::string& job, int epoch) {
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

// The first rank that this one reaches on this host.
int find_leader(const std::string& place, int rank, const std::vector<std::string>& likely) {
  for (int other = 0; other < rank; ++other) {
    const bool may = likely[size_t(other)] == likely[size_t(rank)];
    if (may && is_found(place + "/rank" + std::to_string(other))) return other;
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
  world.local_rank = topology.local[size_t(world.rank)];
  world.local_size = int(topology.hosts[size_t(host)].size());
  world.cross_rank = world.cross_size = 0;  // among the hosts that have this local rank
  for (int other = 0; other < int(topology.hosts.size()); ++other) {
    if (int(topology.hosts[size_t(other)].size()) <= world.local_rank) continue;
    if (other < host) ++world.cross_rank;
    ++world.cross_size;
  }
}

Joined join_one_host(World world, const Config& config, int epoch, uint64_t deadline_ns) {
  const std::string note = WireWriter().put(std::string(LIGHTCC_VERSION)).put(shared_settings(config)).take();
  auto host = Host::join(place_of(world.job, epoch), world.rank, world.size, name_of(world), note, deadline_ns);
  std::vector<std::string> settings, names;
  for (int rank = 0; rank < world.size; ++rank) {
    WireReader reader(host->note(rank));
    if (const std::string version = reader.text(); version != LIGHTCC_VERSION)
      throw Error(Code::invalid_argument, "init: " + host->name(rank) + " runs lightcc " + version + ", rank " +
                                              std::to_string(world.rank) + " " LIGHTCC_VERSION);
    settings.push_back(reader.text()), names.push_back(host->name(rank));
  }
  number_hosts(world, Topology::one_host(world.size));
  const Config agreed = agree(config, world.rank, settings, names);
  return {std::make_unique<Peers>(std::move(host)), std::move(world), agreed, "one host"};
}

class Meet {  // of ranks on several hosts, as far as this one knows
 public:
  Meet(const World& world, const Config& config, Meeting meeting, int epoch, uint64_t deadline_ns)
      : world_(world), config_(config), meeting_(std::move(meeting)), deadline_ns_(deadline_ns),
        terms_{meeting_.job, LIGHTCC_VERSION, meeting_.secret, epoch},
        place_(place_of(meeting_.job, epoch)), found_(be_found(place_ + "/rank" + std::to_string(world.rank))),
        store_(open_store(world.rank, world.size, terms_, meeting_.places, std::move(meeting_.listener))) {}

  Joined join() {
    try {
      return try_to_join();
    } catch (const Error& error) {
      store_->fail(error);
      throw;
    }
  }

 private:
  Joined try_to_join() {
    Address from;
    if (!config_.iface.empty()) from = interfaces_of(config_)[0].address;
    Door door = open_door(any_address(), ports_of(config_));
    const int port = local_address(door.listener.get()).port();

    std::vector<std::string> likely, names, settings;
    std::vector<int> ports, leaders;
    for (const std::string& note : exchange(WireWriter().put(likely_host(config_)).put(name_of(world_)).put(port).put(
             shared_settings(config_)))) {
      WireReader reader(note);
      likely.push_back(reader.text()), names.push_back(reader.text()), ports.push_back(reader.get<int>());
      settings.push_back(reader.text());
    }
    Address own = from ? from : store_->own_address();
    // Nobody came from elsewhere, so whoever shares rank 0's network is reached as rank 0 is.
    if (!own && is_found(place_ + "/rank0")) own = store_->way_to_root();
    const int leader = find_leader(place_, world_.rank, likely);
    std::vector<Address> addresses;
    for (const std::string& note : exchange(WireWriter().put(leader).put(own ? own.text() : ""))) {
      WireReader reader(note);
      leaders.push_back(reader.get<int>());
      const std::string address = reader.text();
      addresses.push_back(address.empty() ? Address() : Address::parse(address));
    }
    const Topology topology = Topology::by_leader(leaders);
    const int host = topology.host_of[size_t(world_.rank)];
    std::vector<Contact> contacts;
    for (int rank = 0; rank < world_.size; ++rank) {
      // The way to rank 0's host is known, since this rank has gone it; to others it is as they say.
      const bool with_root = topology.share_host(rank, 0) && host != 0 && !from;
      const Address& address = with_root ? store_->way_to_root() : addresses[size_t(rank)];
      if (!address && topology.host_of[size_t(rank)] != host)
        throw Error(Code::internal, "init: no address is known for " + names[size_t(rank)] + "; set LIGHTCC_IFACE");
      contacts.push_back({names[size_t(rank)], address ? address.with_port(ports[size_t(rank)]) : address});
    }

    auto& mates = topology.hosts[size_t(host)];
    auto memory = Host::join(place_ + "/" + std::to_string(leader), topology.local[size_t(world_.rank)],
                             int(mates.size()), names[size_t(world_.rank)], "", deadline_ns_);
    exchange(WireWriter());  // everyone has come so far: from now on a rank that is not there is a loss
    number_hosts(world_, topology);
    std::string how = describe(meeting_, *store_);
    const Config agreed = agree(config_, world_.rank, settings, names);
    if (topology.hosts.size() == 1)
      return {std::make_unique<Peers>(std::move(memory)), world_, agreed, how};
    return {Peers::connected(terms_, world_.rank, topology, contacts, std::move(memory), std::move(door), from), world_,
            agreed, how};
  }

  std::vector<std::string> exchange(WireWriter& note) { return store_->exchange(note.take(), deadline_ns_); }
  std::vector<std::string> exchange(WireWriter&& note) { return exchange(note); }

  World world_;
  const Config& config_;
  Meeting meeting_;
  const uint64_t deadline_ns_;
  const Terms terms_;
  const std::string place_;
  const Fd found_;
  std::unique_ptr<Store> store_;
};

}  // namespace

Joined join(const World& world, const Config& config, const Environment& env, int epoch, uint64_t deadline_ns) {
  std::optional<Meeting> meeting;
  if (world.size > 1) meeting = find_meeting(world, config, env, epoch, deadline_ns);
  if (!meeting) return join_one_host(world, config, epoch, deadline_ns);
  return join_at(world, config, std::move(*meeting), epoch, deadline_ns);
}

Joined join_at(const World& world, const Config& config, Meeting meeting, int epoch, uint64_t deadline_ns) {
  return Meet(world, config, std::move(meeting), epoch, deadline_ns).join();
}

}  // namespace lightcc
