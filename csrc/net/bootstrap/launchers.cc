#include "net/bootstrap/launchers.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/hmac.h"
#include "base/text.h"
#include "base/types.h"
#include "net/bootstrap/pmi.h"
#include "net/bootstrap/pmix.h"
#include "net/bootstrap/slurm.h"

namespace lightcc {
namespace {

constexpr int kPorts = 16;  // that rank 0 may choose from where a method names one
constexpr int kSlurmFirst = 20000, kSlurmPorts = 20000;
constexpr int kMostPortsTried = 64;  // of LIGHTCC_PORT_RANGE
constexpr int kLargestPort = 65535;

struct LaunchInfo {
  const World& world;
  const Config& config;
  const Environment& env;
  int epoch;
  uint64_t deadline_ns;

  bool root() const { return world.rank == 0; }
  std::string text(const char* name) const { return env(name) ? env(name) : ""; }
  std::string secret() const {
    const std::string own = text("LIGHTCC_SECRET");
    return own.empty() ? text("HOROVOD_SECRET_KEY") : own;
  }
  // What tells worlds of some ranks of a job from each other.
  std::string members() const { return world.members.empty() ? "" : "/ranks " + text_of(world.members); }
};

[[noreturn]] void refuse(const std::string& text) { throw Error(Code::invalid_argument, "init: " + text); }

int port_in(const std::string& name, std::string_view text) {
  int port = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port < 1 || port > kLargestPort)
    refuse(name + ": '" + shown(text) + "' is not a port from 1 to 65535");
  return port;
}

Fd listen_in(Ports ports) {
  try {
    return listen_on(any_address(), ports);
  } catch (const Error& error) {
    throw Error(error.code(), std::string("init: rank 0 ") + error.what() +
                                  "; free one of them, or set LIGHTCC_PORT_RANGE or LIGHTCC_STORE_ADDR on all ranks");
  }
}

bool is_here(const std::string& host) {
  const auto own = interfaces();
  for (const Address& address : Address::resolve(host, 0)) {
    auto same = [&](const Interface& interface) { return interface.address.same_host(address); };
    if (address.is_loopback() || std::any_of(own.begin(), own.end(), same)) return true;
  }
  return false;
}

// A rendezvous at hosts that are known from the start, on one of several ports: rank 0 takes the first that is free,
// and the others try all.
Rendezvous rendezvous_at(const LaunchInfo& c, const std::string& how, const std::vector<Endpoint>& first, int count) {
  Rendezvous rendezvous;
  rendezvous.how = c.world.launcher == how ? how : c.world.launcher + ", " + how;
  rendezvous.secret = c.secret();
  // By the endpoint if there is no better name. Not by its host, which ranks may spell differently.
  rendezvous.job = c.world.job_of_host ? "port " + std::to_string(first[0].port) + c.members() : c.world.job;
  // Nothing distributes a better one. It keeps jobs apart.
  if (rendezvous.secret.empty()) rendezvous.secret = "job " + rendezvous.job;
  for (int i = 0; i < count; ++i)
    for (const Endpoint& endpoint : first)
      if (endpoint.port + i <= kLargestPort) rendezvous.endpoints.push_back({endpoint.host, endpoint.port + i});
  if (!c.root()) return rendezvous;
  const int launched = c.world.launched_rank(0);
  auto here = [](const Endpoint& endpoint) { return is_here(endpoint.host); };
  if (launched != 0 && std::none_of(first.begin(), first.end(), here))
    refuse("init(comm=[" + text_of(c.world.members) + "]): its first rank, " + std::to_string(launched) +
           ", is on host " + c.world.host + ", but " + how + " lets ranks meet at " + first[0].host +
           "; list a rank of that host first, or set LIGHTCC_STORE_ADDR=" + c.world.host + ":port on these ranks");
  rendezvous.listener = listen_in({first[0].port, std::min(first[0].port + count - 1, kLargestPort)});
  rendezvous.endpoints = {{first[0].host, local_address(rendezvous.listener.get()).port()}};
  return rendezvous;
}
Rendezvous rendezvous_at(const LaunchInfo& c, const std::string& how, const std::string& host, int port) {
  if (const Ports ports = ports_of(c.config); ports.first)
    return rendezvous_at(c, how, {{host, ports.first}}, std::min(ports.last - ports.first + 1, kMostPortsTried));
  return rendezvous_at(c, how, {{host, port}}, kPorts);
}

Rendezvous by_address(const LaunchInfo& c) {
  return rendezvous_at(c, "LIGHTCC_STORE_ADDR", parse_endpoints("LIGHTCC_STORE_ADDR", c.config.store_addr), kPorts);
}

Rendezvous by_master(const LaunchInfo& c) {
  const int port = port_in("MASTER_PORT", c.text("MASTER_PORT"));
  if (port == kLargestPort) refuse("MASTER_PORT=65535 leaves no port after it, on which the ranks could meet");
  return rendezvous_at(c, "MASTER_ADDR", c.text("MASTER_ADDR"), port + 1);  // the port itself is torch's own
}

Rendezvous by_slurm(const LaunchInfo& c) {
  const std::string step = c.text("SLURM_STEP_NODELIST");
  const std::string host = expand_hosts(step.empty() ? c.text("SLURM_JOB_NODELIST") : step)[0];
  auto number = [&](const char* name) {
    uint64_t value = 0;
    const std::string text = c.text(name);
    std::from_chars(text.data(), text.data() + text.size(), value);
    return value;
  };
  // Jobs one after the other, and steps of one job, do not share ports.
  const uint64_t slot = (number("SLURM_JOB_ID") + 97 * number("SLURM_STEP_ID")) % (kSlurmPorts / kPorts);
  return rendezvous_at(c, "first host of the node list", host, kSlurmFirst + int(slot) * kPorts);
}

// What rank 0 broadcasts through the launcher: the secret and where it listens, "5f..;10.0.0.1:4711,[fd00::1]:4711".
// Instead of the secret "-": all have LIGHTCC_SECRET (or HOROVOD_SECRET_KEY).
std::string rendezvous_note(const LaunchInfo& c, Rendezvous& rendezvous) {
  rendezvous = open_rendezvous(c.config, c.world);
  std::string note = "-";
  if (c.secret().empty()) {
    uint8_t drawn[16];
    if (getrandom(drawn, sizeof drawn, 0) != sizeof drawn) throw system_error("init: drawing a secret");
    note.clear();
    for (uint8_t byte : drawn) note += "0123456789abcdef"[byte >> 4], note += "0123456789abcdef"[byte & 15];
  }
  return note + ";" + text_of(rendezvous.endpoints);
}

void read_rendezvous_note(const LaunchInfo& c, const std::string& note, Rendezvous& rendezvous) {
  const size_t end = note.find(';');
  if (end == std::string::npos)
    throw Error(Code::internal, "init: what rank 0 handed out through the launcher is damaged");
  rendezvous.endpoints = parse_endpoints("rank 0's addresses", note.substr(end + 1));
  rendezvous.secret = note.substr(0, end);
  if (rendezvous.secret != "-") return;
  rendezvous.secret = c.secret();
  if (rendezvous.secret.empty())
    refuse("rank 0 has LIGHTCC_SECRET and rank " + std::to_string(c.world.rank) + " on host " + c.world.host +
           " has not; set it on all ranks (mpirun -x LIGHTCC_SECRET), or on none: then one is drawn");
}

std::string key_of(const LaunchInfo& c) {
  const Digest digest = sha256(c.members());
  std::string key = "lightcc-" + std::to_string(c.epoch) + "-";
  for (int i = 0; i < 4; ++i) key += std::to_string(digest[size_t(i)]) + (i < 3 ? "." : "");
  return key;
}

Rendezvous by_pmi(const LaunchInfo& c) {
  Rendezvous rendezvous;
  std::optional<std::string> mine;
  if (c.root()) mine = rendezvous_note(c, rendezvous);
  int fd = -1;
  const std::string text = c.text("PMI_FD");
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), fd);
  if (error != std::errc() || *end || fd < 0) refuse("PMI_FD=" + text + " is not a descriptor");
  finalize_pmi_at_exit(fd);
  const PmiNote got = broadcast_by_pmi(fd, key_of(c), mine, c.deadline_ns);
  read_rendezvous_note(c, got.note, rendezvous);
  rendezvous.how = c.world.launcher;
  rendezvous.job = got.kvs_name + c.members();
  return rendezvous;
}

Rendezvous by_pmix(const LaunchInfo& c) {
  Rendezvous rendezvous;
  std::optional<std::string> mine;
  if (c.root()) mine = rendezvous_note(c, rendezvous);
  std::vector<int> ranks;
  for (int rank = 0; rank < c.world.size; ++rank) ranks.push_back(c.world.launched_rank(rank));
  const bool open_mpi_4 = !c.text("OMPI_MCA_ess_base_jobid").empty();  // set by its mpirun, and by none after it
  const PmixNote got = broadcast_by_pmix(pmix_library(getppid()), open_mpi_4 ? PmixClient::itself : PmixClient::child,
                                         key_of(c), ranks, mine, c.deadline_ns);
  read_rendezvous_note(c, got.note, rendezvous);
  rendezvous.how = c.world.launcher + ", PMIx " + got.version;
  rendezvous.job = c.world.job;
  return rendezvous;
}

// In the order in which they are tried. Open MPI and PMI come before MASTER_ADDR, which mpirun does not forward: it may
// be set on some hosts only.
struct Method {
  const char* name;
  bool (*fits)(const LaunchInfo&);
  Rendezvous (*arrange)(const LaunchInfo&);
};
constexpr Method kMethods[] = {
    {"address", [](const LaunchInfo& c) { return !c.config.store_addr.empty() && !is_nested(c.env); }, by_address},
    {"PMI", [](const LaunchInfo& c) { return c.world.launcher == "PMI" && !c.text("PMI_FD").empty(); }, by_pmi},
    {"PMIx", [](const LaunchInfo& c) { return c.world.launcher == "Open MPI"; }, by_pmix},
    {"master", [](const LaunchInfo& c) { return !c.text("MASTER_ADDR").empty() && !c.text("MASTER_PORT").empty(); },
     by_master},
    {"Slurm",
     [](const LaunchInfo& c) {
       return c.world.launcher == "Slurm" &&
              (!c.text("SLURM_STEP_NODELIST").empty() || !c.text("SLURM_JOB_NODELIST").empty());
     },
     by_slurm}};

const Method* find_method(const LaunchInfo& c) {
  if (c.world.one_host()) return nullptr;
  for (const Method& method : kMethods)
    if (method.fits(c)) return &method;
  return nullptr;
}

}  // namespace

std::vector<Endpoint> parse_endpoints(const std::string& name, const std::string& list) {
  std::vector<Endpoint> endpoints;
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    const std::string one = list.substr(at, comma - at);
    const size_t colon = one.rfind(':');
    at = comma + 1;
    if (colon == std::string::npos || colon == 0 || one.back() == ']')
      refuse(name + "=" + list + ": expected host:port, or several with commas in between");
    std::string host = one.substr(0, colon);
    if (host.front() == '[' && host.back() == ']')
      host = host.substr(1, host.size() - 2);
    else if (host.find(':') != std::string::npos)
      refuse(name + "=" + list + ": an IPv6 address is expected in brackets, [" + host + "]:port");
    endpoints.push_back({host, port_in(name + "=" + list, one.substr(colon + 1))});
  }
  return endpoints;
}

std::string text_of(const std::vector<Endpoint>& endpoints) {
  std::string text;
  for (const Endpoint& one : endpoints) {
    const bool v6 = one.host.find(':') != std::string::npos;
    text += (text.empty() ? "" : ",") + (v6 ? "[" + one.host + "]" : one.host) + ":" + std::to_string(one.port);
  }
  return text;
}

Ports ports_of(const Config& config) {
  if (config.port_range.empty()) return {};
  try {
    return parse_ports(config.port_range);
  } catch (const Error& error) {
    refuse(std::string("LIGHTCC_PORT_RANGE: ") + error.what());
  }
}

std::vector<Interface> interfaces_of(const Config& config) {
  try {
    return chosen(interfaces(), config.iface);
  } catch (const Error& error) {
    refuse(std::string("LIGHTCC_IFACE: ") + error.what());
  }
}

Rendezvous open_rendezvous(const Config& config, const World& world) {
  Rendezvous rendezvous;
  rendezvous.listener = listen_in(ports_of(config));
  const int port = local_address(rendezvous.listener.get()).port();
  std::vector<Interface> own = interfaces_of(config);
  auto elsewhere = [](const Interface& interface) { return !interface.address.is_loopback(); };
  if (std::any_of(own.begin(), own.end(), elsewhere))  // else the ranks may still be on one host
    std::erase_if(own, [&](const Interface& interface) { return !elsewhere(interface); });
  if (own.empty()) throw Error(Code::internal, "init: rank 0's host " + world.host + " has no network interface");
  for (const Interface& interface : own) {
    std::string host = interface.address.with_port(0).text();
    rendezvous.endpoints.push_back({host, port});
  }
  return rendezvous;
}

std::optional<Rendezvous> find_rendezvous(const World& world, const Config& config, const Environment& env, int epoch,
                                          uint64_t deadline_ns) {
  const LaunchInfo c{world, config, env, epoch, deadline_ns};
  if (const Method* method = find_method(c)) return method->arrange(c);
  if (world.one_host() || world.local_size == 0) return {};
  refuse(
      world.launcher + " started " + std::to_string(world.local_size) + " of " + std::to_string(world.size) +
      " ranks on host " + world.host +
      " and does not say where they can meet. Any of these helps: set LIGHTCC_STORE_ADDR=host:port on all ranks, the "
      "host of rank 0 and a port that is free there; set MASTER_ADDR and MASTER_PORT likewise; start the ranks with "
      "lightccrun, torchrun, Open MPI's mpirun, mpiexec of MPICH or Intel MPI (which sets PMI_FD), or srun");
}

std::string rendezvous_method(const World& world, const Config& config, const Environment& env) {
  const Method* method = find_method({world, config, env, 0, 0});
  return method ? method->name : "";
}

std::string describe(const Rendezvous& rendezvous, const BootstrapExchange& exchange) {
  if (const Address at = exchange.root_address()) return rendezvous.how + " at " + at.text();
  const Endpoint& endpoint = rendezvous.endpoints.at(0);
  const bool v6 = endpoint.host.find(':') != std::string::npos;
  return rendezvous.how + " at " + (v6 ? "[" + endpoint.host + "]" : endpoint.host) + ":" +
         std::to_string(endpoint.port);
}

}  // namespace lightcc
