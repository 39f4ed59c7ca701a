#include "harp_plugin/tools/bench/settings.h"

#include <sched.h>

#include <charconv>
#include <sstream>
#include <variant>

#include "base/error.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;

struct Option {
  const char* name;
  std::variant<std::string Workload::*, uint64_t Workload::*, double Workload::*> member;
  bool both_sides;
  const char* help;
};

const Option kOptions[] = {
    {"mode", &Workload::mode, true, "throughput, latency, streams or idle"},
    {"transport", &Workload::transport, true, "harp; tcp: the kernel's in the same pattern; plugin=PATH: NCCL's"},
    {"port", &Workload::port, true, "of HARP: udp, shm or mem"},
    {"message", &Workload::message_bytes, true, "bytes of a message, with K or M"},
    {"footprint", &Workload::footprint_bytes, true, "bytes of a connection's buffers on each side, used in turn"},
    {"depth", &Workload::depth, true, "requests outstanding"},
    {"connections", &Workload::connections, true, "between the two sides"},
    {"threads", &Workload::threads, true, "of the application on each side"},
    {"engines", &Workload::engines, true, "of HARP on each side"},
    {"engine-mode", &Workload::engine_mode, true, "auto, inline or threads"},
    {"paths", &Workload::paths, true, "UDP source ports of a connection"},
    {"mtu", &Workload::mtu, true, "0: the interface's"},
    {"peer-timeout-ms", &Workload::peer_timeout_ms, true, "0: HARP's default"},
    {"secret", &Workload::secret, true, "authenticates every packet"},
    {"warm-up", &Workload::warm_up_s, true, "seconds that do not count"},
    {"seconds", &Workload::seconds, true, "that count"},
    {"check", &Workload::check, true, "sampled, or full: every byte of every message"},
    {"pause-us", &Workload::pause_us, true, "sleep after a turn in which nothing was done; 0: poll"},
    {"flows", &Workload::flows, true, "tcp, plugins: connections that a message is striped over"},
    {"socket-buffer", &Workload::socket_buffer, true, "tcp: bytes; 0: the kernel tunes them"},
    {"congestion", &Workload::congestion, true, "tcp: congestion control"},
    {"listen", &Workload::listen, false, "[ADDRESS:]PORT: be a server"},
    {"connect", &Workload::connect, false, "ADDRESS:PORT of a server; default: start one"},
    {"sessions", &Workload::sessions, false, "that the server serves; 0: for ever"},
    {"interface", &Workload::interface, false, "that HARP uses"},
    {"cores", &Workload::cores, false, "that this process is bound to, as 0,1"},
    {"server-cores", &Workload::server_cores, false, "the same for the server that it starts"},
    {"pairs", &Workload::pairs, false, "both sides in one thread, over mem; so many of these, each on a core"},
    {"pairs-as", &Workload::pairs_as, false, "threads or processes"},
};

template <class Number>
Number number(const std::string& text, const char* name) {
  Number value{};
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string unit(rest, text.data() + text.size());
  if (unit == "K") value *= 1024, unit.clear();
  if (unit == "M") value *= 1024 * 1024, unit.clear();
  if (error != std::errc() || !unit.empty())
    throw Error(Code::invalid_argument, "--" + std::string(name) + ": not a number: '" + text + "'");
  return value;
}

struct Set {
  Workload& settings;
  const Option& option;
  const std::string& text;
  void operator()(std::string Workload::* member) const { settings.*member = text; }
  void operator()(uint64_t Workload::* member) const { settings.*member = number<uint64_t>(text, option.name); }
  void operator()(double Workload::* member) const { settings.*member = number<double>(text, option.name); }
};

struct Text {
  const Workload& settings;
  std::string operator()(std::string Workload::* member) const { return settings.*member; }
  std::string operator()(uint64_t Workload::* member) const { return std::to_string(settings.*member); }
  std::string operator()(double Workload::* member) const { return std::to_string(settings.*member); }
};

void set(Workload& settings, const std::string& name, const std::string& text) {
  for (const Option& option : kOptions)
    if (name == option.name) return std::visit(Set{settings, option, text}, option.member);
  throw Error(Code::invalid_argument, "no such option: --" + name);
}

void one_of(const char* name, const std::string& value, const std::vector<std::string>& values) {
  std::string all;
  for (const std::string& one : values) {
    if (one == value) return;
    all += (all.empty() ? "" : ", ") + one;
  }
  throw Error(Code::invalid_argument, "--" + std::string(name) + " is '" + value + "': expected one of " + all);
}

void least(const char* name, uint64_t value, uint64_t bound) {
  if (value >= bound) return;
  throw Error(Code::invalid_argument, "--" + std::string(name) + ": at least " + std::to_string(bound));
}

void check(const Workload& s) {
  one_of("mode", s.mode, {"throughput", "latency", "streams", "idle"});
  if (!s.transport.starts_with("plugin=")) one_of("transport", s.transport, {"harp", "tcp", "plugin=PATH"});
  one_of("engine-mode", s.engine_mode, {"auto", "inline", "threads"});
  one_of("check", s.check, {"sampled", "full"});
  one_of("pairs-as", s.pairs_as, {"threads", "processes"});
  least("message", s.message_bytes, 64);  // what pattern.h needs
  least("depth", s.depth, 1);
  least("connections", s.connections, 1);
  least("threads", s.threads, 1);
  least("flows", s.flows, 1);
  if (s.threads > s.connections)
    throw Error(Code::invalid_argument, "--threads: a connection is used by one thread: at most --connections");
}

}  // namespace

Workload parse(const std::vector<std::string>& arguments) {
  Workload settings;
  for (size_t i = 0; i < arguments.size(); i += 2) {
    if (arguments[i].rfind("--", 0) != 0 || i + 1 == arguments.size())
      throw Error(Code::invalid_argument, "expected --OPTION VALUE at '" + arguments[i] + "'");
    set(settings, arguments[i].substr(2), arguments[i + 1]);
  }
  check(settings);
  return settings;
}

std::string help() {
  const Workload defaults;
  std::ostringstream text;
  for (const Option& option : kOptions) {
    const std::string value = std::visit(Text{defaults}, option.member);
    text << "  --" << option.name << std::string(18 - std::string(option.name).size(), ' ') << option.help
         << (value.empty() ? "" : " (" + value + ")") << "\n";
  }
  return text.str();
}

std::string for_server(const Workload& settings) {
  std::string lines;
  for (const Option& option : kOptions)
    if (option.both_sides) lines += std::string(option.name) + "=" + std::visit(Text{settings}, option.member) + "\n";
  return lines;
}

Workload from_client(const std::string& lines, const Workload& own) {
  Workload settings = own;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    const size_t equals = line.find('=');
    if (equals == std::string::npos) throw Error(Code::mismatch, "the client sent a line without '=': " + line);
    set(settings, line.substr(0, equals), line.substr(equals + 1));
  }
  check(settings);
  return settings;
}

std::vector<int> core_list(const std::string& text) {
  std::vector<int> cores;
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) cores.push_back(int(number<uint64_t>(one, "cores")));
  return cores;
}

void bind_to(const std::string& cores) {
  if (cores.empty()) return;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (const int core : core_list(cores)) CPU_SET(core, &mask);
  if (sched_setaffinity(0, sizeof mask, &mask) != 0) throw lightcc::system_error("bind to cores " + cores);
}

}  // namespace harp::bench
