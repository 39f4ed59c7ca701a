#include "harp_plugin/api/config.h"

#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "harp_plugin/port/xdp_lease.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;

constexpr int64_t kMostEngines = 64;
constexpr int64_t kLeastMtu = 576, kMostMtu = 65535;
constexpr int64_t kMostReceives = 8;  // that NCCL groups
constexpr int64_t kMostDelayTargetUs = 1'000'000;
constexpr int64_t kMostTimeoutMs = 86'400'000;

std::optional<int64_t> number_in(const std::string& text, int64_t least, int64_t most) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < least || value > most) return {};
  return value;
}

// A setting's text, and what it may be read as.
struct Value {
  const char* name;
  std::string text;

  [[noreturn]] void refuse(const std::string& expected) const {
    throw Error(Code::invalid_argument, std::string(name) + "=" + lightcc::shown(text) + ": expected " + expected);
  }
  int64_t whole(int64_t least, int64_t most) const {
    if (const auto value = number_in(text, least, most)) return *value;
    refuse("a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  bool flag() const {
    if (text == "0" || text == "1") return text == "1";
    refuse("0 or 1");
  }
};

// "20000-20100" or "20000".
void set_ports(Config& config, const Value& value) {
  const size_t dash = value.text.find('-');
  const auto first = number_in(value.text.substr(0, dash), 1, UINT16_MAX);
  const auto last = dash == std::string::npos ? first : number_in(value.text.substr(dash + 1), 1, UINT16_MAX);
  if (!first || !last || *last < *first) value.refuse("UDP ports from 1 to 65535, as 20000-20100 or 20000");
  config.first_port = static_cast<uint16_t>(*first);
  config.last_port = static_cast<uint16_t>(*last);
}

struct Knob {
  const char* name;
  const char* fallback;
  const char* help;
  void (*set)(Config&, const Value&);
  const char* other_name = nullptr;  // read if it is not set itself
};

constexpr Knob kKnobs[] = {
    {"HARP_PORT", "udp",
     "What carries packets: `udp`, `xdp` (AF_XDP, past the kernel's stack), `shm` within a host, `mem` within a "
     "process.",
     [](Config& c, const Value& v) { c.port = v.text; }},
    {"HARP_IFNAME", "(any)",
     "udp, xdp: interfaces as in `NCCL_SOCKET_IFNAME` (which is read if this is not set), or an IPv4 address.",
     [](Config& c, const Value& v) { c.interface = v.text; }, "NCCL_SOCKET_IFNAME"},
    {"HARP_ENGINES", "1", "Threads that move packets, each with a core of its own and a port.",
     [](Config& c, const Value& v) { c.engines = static_cast<int>(v.whole(1, kMostEngines)); }},
    {"HARP_INLINE", "(by cores)",
     "1: `harp_test` and `harp_poll` do the engine's work while they are called; 2: its threads alone do; 3: "
     "`harp_poll` alone does. By default 1 if there are fewer than two cores for each engine and two more, else 2.",
     [](Config& c, const Value& v) { c.inline_mode = static_cast<int>(v.whole(1, 3)); }},
    {"HARP_PATHS", "1", "UDP source ports of a connection, so that switches spread it.",
     [](Config& c, const Value& v) { c.paths = static_cast<int>(v.whole(1, kMostPaths)); }},
    {"HARP_PORT_RANGE", "(any)", "udp, xdp: the only UDP ports to use, `20000-20100` or `20000`.", set_ports},
    {"HARP_MTU", "(the interface's)", "udp, xdp, mem: bytes of the largest packet, IP header included.",
     [](Config& c, const Value& v) { c.mtu = static_cast<uint32_t>(v.whole(kLeastMtu, kMostMtu)); }},
    {"HARP_DELAY_TARGET_US", "(by who polls)",
     "Microseconds that packets may wait on the way before a connection sends less. By default 100 where threads of "
     "their own poll; 3000 where the application does (`HARP_INLINE` 1 and 3), whose other work is most of that wait.",
     [](Config& c, const Value& v) { c.delay_target_us = static_cast<uint64_t>(v.whole(1, kMostDelayTargetUs)); }},
    {"HARP_PEER_TIMEOUT_MS", "4000", "A peer that gives no sign of life for so long has failed.",
     [](Config& c, const Value& v) { c.peer_timeout_ms = static_cast<uint64_t>(v.whole(1, kMostTimeoutMs)); }},
    {"HARP_CONNECT_TIMEOUT_MS", "60000", "How long connecting is tried.",
     [](Config& c, const Value& v) { c.connect_timeout_ms = static_cast<uint64_t>(v.whole(1, kMostTimeoutMs)); }},
    {"HARP_AUTH", "0", "1: every packet carries a tag under a key derived from `HARP_SECRET`.",
     [](Config& c, const Value& v) { c.authenticate = v.flag(); }},
    {"HARP_SECRET", "(none)", "The secret of `HARP_AUTH`, the same in all processes.",
     [](Config& c, const Value& v) { c.secret = v.text; }},
    {"HARP_STATS", "1",
     "1: counters are shown in a file that harp-stat reads, `/tmp/harp-UID/PID-N`, or below `/run` where another user "
     "has taken that name.",
     [](Config& c, const Value& v) { c.stats = v.flag(); }},
    {"HARP_GSO", "1", "udp: the kernel cuts large sends into packets (UDP_SEGMENT), if it can.",
     [](Config& c, const Value& v) { c.gso = v.flag(); }},
    {"HARP_GRO", "1", "udp: the kernel joins received packets (UDP_GRO), if it can.",
     [](Config& c, const Value& v) { c.gro = v.flag(); }},
    {"HARP_XDP_COPIES", "(by driver)",
     "xdp: 0: opening fails where the kernel has to copy packets to and from the shared memory; 1: it copies always. "
     "By default where the driver cannot do without.",
     [](Config& c, const Value& v) { c.xdp_copies = v.flag() ? XskCopies::always : XskCopies::never; }},
    {"HARP_XDP_QUEUES", "(all)",
     "xdp: how many of the interface's queues at most; packets that come by others go through the kernel, slower.",
     [](Config& c, const Value& v) { c.xdp_queues = static_cast<uint32_t>(v.whole(1, kMostXdpQueues)); }},
    {"HARP_HARPD", "(none)", "xdp: where harpd listens, which opens the sockets for who may not.",
     [](Config& c, const Value& v) { c.harpd = v.text; }},
    {"HARP_XDP_FALLBACK", "0",
     "xdp: when harpd ends under a running process: 1: the kernel carries all packets from then on; 0: connections end "
     "with an error.",
     [](Config& c, const Value& v) { c.xdp_fallback = v.flag(); }},
    {"HARP_MAX_RECVS", "1",
     "NCCL's plugin: how many receives NCCL may group in one, up to 8; a group costs a message more.",
     [](Config& c, const Value& v) { c.most_receives = static_cast<int>(v.whole(1, kMostReceives)); }},
};

const char* text_if_set(const Environment& environment, const char* name) {
  const char* text = name ? environment(name) : nullptr;
  return text && *text ? text : nullptr;  // NAME= in a shell script means "not set"
}

// What this library knows of it: a program may have been compiled with another version's.
harp_options known_part(const harp_options* given) {
  harp_options options{};
  if (!given) return options;
  if (given->size < sizeof given->size || given->size > 4096)
    throw Error(Code::invalid_argument, "harp_options.size=" + std::to_string(given->size) +
                                            ": expected sizeof(harp_options)");
  std::memcpy(&options, given, std::min<size_t>(given->size, sizeof options));
  const char* bytes = reinterpret_cast<const char*>(given);
  for (size_t i = sizeof options; i < given->size; ++i)
    if (bytes[i]) throw Error(Code::invalid_argument, "harp_options has a member that this version does not know");
  return options;
}

// A member of harp_options goes through the same check as the variable of the same meaning.
void apply(Config& config, const char* variable, const char* member, const std::string& text) {
  for (const Knob& knob : kKnobs)
    if (std::strcmp(knob.name, variable) == 0) knob.set(config, {member, text});
}

}  // namespace

const char* process_environment(const char* name) { return std::getenv(name); }

Config read_config(const harp_options* given, const Environment& environment) {
  const harp_options options = known_part(given);
  Config config;
  for (const Knob& knob : kKnobs) {
    const char* name = text_if_set(environment, knob.name) ? knob.name : knob.other_name;
    if (const char* text = text_if_set(environment, name)) knob.set(config, {name, text});
  }
  const auto number = [&](const char* variable, const char* member, int64_t value) {
    if (value != 0) apply(config, variable, member, std::to_string(value));
  };
  const auto text = [&](const char* variable, const char* member, const char* value) {
    if (value && *value) apply(config, variable, member, value);
  };
  text("HARP_PORT", "harp_options.port", options.port);
  text("HARP_IFNAME", "harp_options.interface", options.interface);
  number("HARP_ENGINES", "harp_options.engines", options.engines);
  number("HARP_INLINE", "harp_options.inline_mode", options.inline_mode);
  number("HARP_PATHS", "harp_options.paths", options.paths);
  number("HARP_MTU", "harp_options.mtu", options.mtu);
  number("HARP_PEER_TIMEOUT_MS", "harp_options.peer_timeout_ms", options.peer_timeout_ms);
  number("HARP_CONNECT_TIMEOUT_MS", "harp_options.connect_timeout_ms", options.connect_timeout_ms);
  if (options.authenticate < 0 || options.authenticate > 2)
    Value{"harp_options.authenticate", std::to_string(options.authenticate)}.refuse("0, 1 or 2");
  if (options.authenticate != 0) config.authenticate = options.authenticate == 1;
  text("HARP_SECRET", "harp_options.secret", options.secret);
  text("HARP_PORT_RANGE", "harp_options.port_range", options.port_range);
  if (config.authenticate && config.secret.empty())
    throw Error(Code::invalid_argument, "authentication needs a secret: set HARP_SECRET or harp_options.secret");
  return config;
}

std::string knobs_table() {
  std::string table = "| variable | default | meaning |\n| --- | --- | --- |\n";
  for (const Knob& knob : kKnobs)
    table += std::string("| `") + knob.name + "` | " + knob.fallback + " | " + knob.help + " |\n";
  return table;
}

}  // namespace harp
