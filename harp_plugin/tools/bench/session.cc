#include "harp_plugin/tools/bench/session.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "harp_plugin/tools/bench/channel.h"
#include "harp_plugin/tools/bench/socket.h"
#include "harp_plugin/tools/bench/traffic.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;
using lightcc::JsonObject;

constexpr double kOpenS = 30;

std::unique_ptr<Transport> make_transport(const Workload& s, const std::string& own_address) {
  if (s.transport.starts_with(kPluginPrefix)) return make_plugin(s);
  return s.transport == "tcp" ? make_tcp(s, address_of(own_address)) : make_harp(s);
}

using Parties = std::vector<std::unique_ptr<Party>>;

// The connections of one side and who uses them, whose buffers may be posted until the connections are closed.
struct Ends {
  Parties parties;
  std::vector<std::unique_ptr<BenchChannel>> channels;
};

// Each thread steps the parties of its share of the connections.
void drive_in_threads(const Parties& parties, const Workload& s) {
  std::vector<std::vector<Party*>> shares(s.threads);
  for (size_t i = 0; i < parties.size(); ++i) shares[i % s.threads].push_back(parties[i].get());
  std::vector<std::exception_ptr> failures(s.threads);
  auto run = [&](size_t share) {
    try {
      drive(shares[share], s);
    } catch (...) {
      failures[share] = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (size_t share = 1; share < s.threads; ++share) threads.emplace_back(run, share);
  run(0);
  threads.clear();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

uint64_t total_bytes(const Parties& parties) {
  return std::accumulate(parties.begin(), parties.end(), uint64_t(0),
                         [](uint64_t sum, const auto& party) { return sum + party->counted_bytes(); });
}

JsonObject idle(const Workload& s) {
  usleep(useconds_t(s.warm_up_s * 1e6));
  const Usage begin = usage_now();
  usleep(useconds_t(s.seconds * 1e6));
  return json_of(usage_now() - begin, 0);
}

// What one side has used. An idle run ends with a message on each connection, of no
// measured time, which shows that all are alive.
template <class MakeParty>
JsonObject measure(Ends& ends, const Workload& s, MakeParty make_party) {
  Workload traffic = s;
  JsonObject idled;
  if (s.mode == "idle") {
    idled = idle(s);
    traffic.warm_up_s = traffic.seconds = 0;
  }
  Window window(ends.channels.size());
  for (const auto& channel : ends.channels) ends.parties.push_back(make_party(*channel, traffic, window));
  drive_in_threads(ends.parties, traffic);
  return s.mode == "idle" ? idled : json_of(window.used(), total_bytes(ends.parties));
}

JsonObject percentiles(std::vector<uint32_t> ns) {
  std::sort(ns.begin(), ns.end());
  auto at = [&](double share) { return double(ns[size_t(share * double(ns.size() - 1))]) * 1e-3; };
  JsonObject object;
  object.add("count", ns.size()).add("p50_us", at(0.5)).add("p90_us", at(0.9)).add("p99_us", at(0.99));
  return object.add("p999_us", at(0.999)).add("most_us", at(1));
}

void serve_client(Control control, const Workload& own) {
  const Workload s = from_client(control.receive(), own);
  const auto transport = make_transport(s, control.own_address());
  control.send(transport->listen());
  Ends ends;
  auto accept_one = [&] {
    transport->progress();
    if (auto channel = transport->accept()) ends.channels.push_back(std::move(channel));
    return ends.channels.size() == s.connections;
  };
  wait_until(accept_one, kOpenS, "connection of the client");
  control.send("go");
  JsonObject used = measure(ends, s, make_server_party);
  control.receive([&] { transport->progress(); });  // until the client has done with it
  used.add_json("stats", transport->stats());
  control.send(used.text());
}

JsonObject described(const Workload& s) {
  JsonObject object;
  object.add("mode", s.mode).add("transport", s.transport).add("message", s.message_bytes).add("depth", s.depth);
  object.add("connections", s.connections).add("threads", s.threads).add("check", s.check).add("pause_us", s.pause_us);
  if (s.transport == "tcp")
    return object.add("flows", s.flows).add("socket_buffer", s.socket_buffer).add("congestion", s.congestion);
  return object.add("port", s.port).add("engines", s.engines).add("engine_mode", s.engine_mode).add("mtu", s.mtu);
}

std::string run_against(const std::string& server, const Workload& s) {
  Control control(connect_to(server));
  control.send(for_server(s));
  const std::string handle = control.receive();
  const auto transport = make_transport(s, control.own_address());
  Ends ends;  // open until the server, which has receives posted, is done as well
  for (uint64_t i = 0; i < s.connections; ++i) ends.channels.push_back(transport->connect(handle));
  control.receive([&] { transport->progress(); });
  JsonObject result = described(s), used = measure(ends, s, make_client_party);
  control.send("done");
  const std::string of_server = control.receive([&] { transport->progress(); });
  used.add_json("stats", transport->stats());
  result.add_json("client", used.text()).add_json("server", of_server);
  std::vector<uint32_t> round_trips;
  for (const auto& party : ends.parties)
    round_trips.insert(round_trips.end(), party->round_trips_ns().begin(), party->round_trips_ns().end());
  if (!round_trips.empty()) result.add_json("round_trip", percentiles(std::move(round_trips)).text());
  return result.text();
}

// A server in another process, which ends when this object does.
class OwnServer {
 public:
  explicit OwnServer(const Workload& s) : listener_(listen_at("127.0.0.1:0")), address_(own_address(listener_.get())) {
    pid_ = fork();
    if (pid_ < 0) throw lightcc::system_error("fork");
    if (pid_ > 0) return;
    int status = 1;
    try {
      bind_to(s.server_cores);
      serve_client(Control(accept_from(listener_.get())), s);
      status = 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "harp-bench: server: %s\n", error.what());
    }
    _exit(status);
  }
  ~OwnServer() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  const std::string& address() const { return address_; }

 private:
  Fd listener_;
  const std::string address_;
  pid_t pid_;
};

}  // namespace

std::string run_client(const Workload& s) {
  if (!s.connect.empty()) {
    bind_to(s.cores);
    return run_against(s.connect, s);
  }
  const OwnServer server(s);
  bind_to(s.cores);
  return run_against(server.address(), s);
}

void serve(const Workload& s) {
  bind_to(s.cores);
  const Fd listener = listen_at(s.listen);
  uint64_t served = 0;
  while (s.sessions == 0 || served < s.sessions) {
    Fd socket = accept_from(listener.get());
    const pid_t pid = fork();
    if (pid < 0) throw lightcc::system_error("fork");
    if (pid == 0) {
      serve_client(Control(std::move(socket)), s);
      std::exit(0);
    }
    waitpid(pid, nullptr, 0);
    ++served;
  }
}

}  // namespace harp::bench
