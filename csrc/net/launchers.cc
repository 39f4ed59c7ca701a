#include "net/launchers.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/hmac.h"
#include "base/types.h"
#include "net/pmi.h"
#include "net/pmix.h"
#include "net/slurm.h"

namespace lightcc {
namespace {

constexpr int kPorts = 16;  // that rank 0 may choose from where a step names one
constexpr int kSlurmFirst = 20000, kSlurmPorts = 20000;
constexpr int kMostScanned = 64;  // of LIGHTCC_PORT_RANGE
constexpr int kLargestPort = 65535;

struct Case {
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
    refuse(name + ": '" + std::string(text) + "' is not a port from 1 to 65535");
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

// A meeting at hosts that are known from the start, on one of several ports: rank 0 takes the first that is free, and
// the others try all.
Meeting meet_at(const Case& c, const std::string& how, const std::vector<Endpoint>& first, int count) {
  Meeting meeting;
  meeting.how = c.world.launcher == how ? how : c.world.launcher + ", " + how;
  meeting.secret = c.secret();
  // By the place if there is no better name. Not by its host, which ranks may spell differently.
  meeting.job = c.world.job_of_host ? "port " + std::to_string(first[0].port) + c.members() : c.world.job;
  // Nothing could hand out a better one. It keeps jobs apart.
  if (meeting.secret.empty()) meeting.secret = "job " + meeting.job;
  for (int i = 0; i < count; ++i)
    for (const Endpoint& place : first)
      if (place.port + i <= kLargestPort) meeting.places.push_back({place.host, place.port + i});
  if (!c.root()) return meeting;
  const int launched = c.world.launched_rank(0);
  auto here = [](const Endpoint& place) { return is_here(place.host); };
  if (launched != 0 && std::none_of(first.begin(), first.end(), here))
    refuse("init(comm=[" + text_of(c.world.members) + "]): its first rank, " + std::to_string(launched) +
           ", is on host " + c.world.host + ", but " + how + " lets ranks meet at " + first[0].host +
           "; list a rank of that host first, or set LIGHTCC_STORE_ADDR=" + c.world.host + ":port on these ranks");
  meeting.listener = listen_in({first[0].port, std::min(first[0].port + count - 1, kLargestPort)});
  meeting.places = {{first[0].host, local_address(meeting.listener.get()).port()}};
  return meeting;
}
Meeting meet_at(const Case& c, const std::string& how, const std::string& host, int port) {
  if (const Ports ports = ports_of(c.config); ports.first)
    return meet_at(c, how, {{host, ports.first}}, std::min(ports.last - ports.first + 1, kMostScanned));
  return meet_at(c, how, {{host, port}}, kPorts);
}

Meeting by_address(const Case& c) {
  return meet_at(c, "LIGHTCC_STORE_ADDR", parse_endpoints("LIGHTCC_STORE_ADDR", c.config.store_addr), kPorts);
}

Meeting by_master(const Case& c) {
  const int port = port_in("MASTER_PORT", c.text("MASTER_PORT"));
  if (port == kLargestPort) refuse("MASTER_PORT=65535 leaves no port after it, on which the ranks could meet");
  return meet_at(c, "MASTER_ADDR", c.text("MASTER_ADDR"), port + 1);  // the port itself is torch's own
}

Meeting by_slurm(const Case& c) {
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
  return meet_at(c, "first host of the node list", host, kSlurmFirst + int(slot) * kPorts);
}

// What rank 0 hands out through the launcher: the secret and where it listens, "5f..;10.0.0.1:4711,[fd00::1]:4711".
// Instead of the secret "-": all have LIGHTCC_SECRET (or HOROVOD_SECRET_KEY).
std::string invitation(const Case& c, Meeting& meeting) {
  meeting = open_meeting(c.config, c.world);
  std::string note = "-";
  if (c.secret().empty()) {
    uint8_t drawn[16];
    if (getrandom(drawn, sizeof drawn, 0) != sizeof drawn) throw system_error("init: drawing a secret");
    note.clear();
    for (uint8_t byte : drawn) note += "0123456789abcdef"[byte >> 4], note += "0123456789abcdef"[byte & 15];
  }
  return note + ";" + text_of(meeting.places);
}

void accept_invitation(const Case& c, const std::string& note, Meeting& meeting) {
  const size_t end = note.find(';');
  if (end == std::string::npos)
    throw Error(Code::internal, "init: what rank 0 handed out through the launcher is damaged");
  meeting.places = parse_endpoints("rank 0's addresses", note.substr(end + 1));
  meeting.secret = note.substr(0, end);
  if (meeting.secret != "-") return;
  meeting.secret = c.secret();
  if (meeting.secret.empty())
    refuse("rank 0 has LIGHTCC_SECRET and rank " + std::to_string(c.world.rank) + " on host " + c.world.host +
           " has not; set it on all ranks (mpirun -x LIGHTCC_SECRET), or on none: then one is drawn");
}

std::string key_of(const Case& c) {
  const Digest digest = sha256(c.members());
  std::string key = "lightcc-" + std::to_string(c.epoch) + "-";
  for (int i = 0; i < 4; ++i) key += std::to_string(digest[size_t(i)]) + (i < 3 ? "." : "");
  return key;
}

Meeting by_pmi(const Case& c) {
  Meeting meeting;
  std::optional<std::string> mine;
  if (c.root()) mine = invitation(c, meeting);
  int fd = -1;
  const std::string text = c.text("PMI_FD");
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), fd);
  if (error != std::errc() || *end || fd < 0) refuse("PMI_FD=" + text + " is not a descriptor");
  finalize_pmi_at_exit(fd);
  const Handout got = hand_out_by_pmi(fd, key_of(c), mine, c.deadline_ns);
  accept_invitation(c, got.note, meeting);
  meeting.how = c.world.launcher, meeting.job = got.board + c.members();
  return meeting;
}

Meeting by_pmix(const Case& c) {
  Meeting meeting;
  std::optional<std::string> mine;
  if (c.root()) mine = invitation(c, meeting);
  std::vector<int> ranks;
  for (int rank = 0; rank < c.world.size; ++rank) ranks.push_back(c.world.launched_rank(rank));
  const bool open_mpi_4 = !c.text("OMPI_MCA_ess_base_jobid").empty();  // set by its mpirun, and by none after it
  const PmixHandout got = hand_out_by_pmix(pmix_library(getppid()), open_mpi_4 ? PmixClient::itself : PmixClient::child,
                                           key_of(c), ranks, mine, c.deadline_ns);
  accept_invitation(c, got.note, meeting);
  meeting.how = c.world.launcher + ", PMIx " + got.version, meeting.job = c.world.job;
  return meeting;
}

// The ladder. Open MPI and PMI come before MASTER_ADDR, which mpirun does not forward: it may be set on some hosts
// only.
struct Step {
  const char* name;
  bool (*fits)(const Case&);
  Meeting (*arrange)(const Case&);
};
constexpr Step kSteps[] = {
    {"address", [](const Case& c) { return !c.config.store_addr.empty(); }, by_address},
    {"PMI", [](const Case& c) { return c.world.launcher == "PMI" && !c.text("PMI_FD").empty(); }, by_pmi},
    {"PMIx", [](const Case& c) { return c.world.launcher == "Open MPI"; }, by_pmix},
    {"master", [](const Case& c) { return !c.text("MASTER_ADDR").empty() && !c.text("MASTER_PORT").empty(); },
     by_master},
    {"Slurm",
     [](const Case& c) {
       return c.world.launcher == "Slurm" &&
              (!c.text("SLURM_STEP_NODELIST").empty() || !c.text("SLURM_JOB_NODELIST").empty());
     },
     by_slurm}};

const Step* find_step(const Case& c) {
  if (c.world.one_host()) return nullptr;
  for (const Step& step : kSteps)
    if (step.fits(c)) return &step;
  return nullptr;
}

}  // namespace

std::vector<Endpoint> parse_endpoints(const std::string& name, const std::string& list) {
  std::vector<Endpoint> places;
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
    places.push_back({host, port_in(name + "=" + list, one.substr(colon + 1))});
  }
  return places;
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

Meeting open_meeting(const Config& config, const World& world) {
  Meeting meeting;
  meeting.listener = listen_in(ports_of(config));
  const int port = local_address(meeting.listener.get()).port();
  std::vector<Interface> own = interfaces_of(config);
  auto elsewhere = [](const Interface& interface) { return !interface.address.is_loopback(); };
  if (std::any_of(own.begin(), own.end(), elsewhere))  // else the ranks may still be on one host
    std::erase_if(own, [&](const Interface& interface) { return !elsewhere(interface); });
  if (own.empty()) throw Error(Code::internal, "init: rank 0's host " + world.host + " has no network interface");
  for (const Interface& interface : own) {
    std::string host = interface.address.with_port(0).text();
    meeting.places.push_back({host, port});
  }
  return meeting;
}

std::optional<Meeting> find_meeting(const World& world, const Config& config, const Environment& env, int epoch,
                                    uint64_t deadline_ns) {
  const Case c{world, config, env, epoch, deadline_ns};
  if (const Step* step = find_step(c)) return step->arrange(c);
  if (world.one_host() || world.local_size == 0) return {};
  refuse(
      world.launcher + " started " + std::to_string(world.local_size) + " of " + std::to_string(world.size) +
      " ranks on host " + world.host +
      " and does not say where they can meet. Any of these helps: set LIGHTCC_STORE_ADDR=host:port on all ranks, the "
      "host of rank 0 and a port that is free there; set MASTER_ADDR and MASTER_PORT likewise; start the ranks with "
      "lightccrun, torchrun, Open MPI's mpirun, mpiexec of MPICH or Intel MPI (which sets PMI_FD), or srun");
}

std::string meeting_step(const World& world, const Config& config, const Environment& env) {
  const Step* step = find_step({world, config, env, 0, 0});
  return step ? step->name : "";
}

std::string describe(const Meeting& meeting, const Store& store) {
  if (const Address at = store.way_to_root()) return meeting.how + " at " + at.text();
  const Endpoint& place = meeting.places.at(0);
  const bool v6 = place.host.find(':') != std::string::npos;
  return meeting.how + " at " + (v6 ? "[" + place.host + "]" : place.host) + ":" + std::to_string(place.port);
}

}  // namespace lightcc
