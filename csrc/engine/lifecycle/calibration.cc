#include "engine/lifecycle/calibration.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <optional>

#include "base/cache_file.h"
#include "base/clock.h"
#include "base/deadline.h"
#include "base/log.h"
#include "collective/cost/cost.h"
#include "collective/cost_model_rules.h"
#include "collective/network_probe.h"
#include "engine/engine.h"
#include "engine/lifecycle/calibrated.h"
#include "engine/lifecycle/hosts_subject.h"
#include "engine/request/request.h"
#include "net/bootstrap/world.h"

namespace lightcc {
namespace {

constexpr uint64_t kLookNs = 5'000'000;   // whether it was cancelled
constexpr size_t kTextBytes = 4096;       // of what rank 0 sends; that is known to all ranks beforehand
constexpr int kProbeGroup = LocalRanks::kGroups - 1;  // whose links nobody has used yet
constexpr double kCappedShare = 0.9;      // of the NIC's rate: a connection that has less is limited by itself
constexpr const char* kCached = "network";  // the name in the file of a set of hosts

// The slowest of all ranks: seconds of a message; seconds a byte of a connection, a host's NIC and its memory; and 1 if
// a rank could not measure.
enum { kLatency, kConnection, kNic, kMemory, kFailed, kMeasured };
using Slowest = std::array<double, kMeasured>;

std::string written(const Cluster& c) {
  char text[128];
  std::snprintf(text, sizeof text, "%.4g %.4g %.4g %.4g", c.latency_s, c.nic_bytes_per_s, c.flow_bytes_per_s,
                c.memory_bytes_per_s);
  return text;
}

std::optional<Cluster> cluster_of(const std::string& text, const Topology& topology) {
  Cluster c;
  for (const auto& ranks : topology.hosts) c.hosts.push_back(int(ranks.size()));
  if (std::sscanf(text.c_str(), "%lf %lf %lf %lf", &c.latency_s, &c.nic_bytes_per_s, &c.flow_bytes_per_s,
                  &c.memory_bytes_per_s) != 4)
    return std::nullopt;
  try {
    c.check();
  } catch (const Error&) {
    return std::nullopt;
  }
  return c;
}

Cluster cluster_of(const Slowest& slowest, const Topology& topology) {
  Cluster c;
  for (const auto& ranks : topology.hosts) c.hosts.push_back(int(ranks.size()));
  c.latency_s = slowest[kLatency];
  const double connection = 1 / slowest[kConnection];
  c.nic_bytes_per_s = std::max(connection, 1 / slowest[kNic]);
  c.flow_bytes_per_s = connection < kCappedShare * c.nic_bytes_per_s ? connection : 0;
  c.memory_bytes_per_s = 1 / slowest[kMemory];
  return c;
}

// With the keys of a cluster file (docs/explain.md).
std::string json_of(const Cluster& c) {
  constexpr double kGbit = 1e9 / 8;
  std::string hosts;
  for (const int ranks : c.hosts) hosts += (hosts.empty() ? "" : ", ") + std::to_string(ranks);
  char numbers[200];
  std::snprintf(numbers, sizeof numbers,
                "\"latency_us\": %.4g, \"nic_gbit_per_s\": %.4g, \"flow_gbit_per_s\": %.4g, "
                "\"memory_gbyte_per_s\": %.4g",
                1e6 * c.latency_s, c.nic_bytes_per_s / kGbit, c.flow_bytes_per_s / kGbit, 1e-9 * c.memory_bytes_per_s);
  return "{\"hosts\": [" + hosts + "], " + numbers + "}";
}

// Costs of the fastest algorithm on this cluster, until batches have been measured (engine/negotiate/control/plan.h).
PlanCosts plan_costs(const Cluster& cluster) {
  constexpr int64_t kSmall = 4 << 10, kLarge = 64 << 20;
  const auto best_s = [&](int64_t bytes) { return allreduce_candidates(cluster, bytes)[0].price.seconds(); };
  const double start_s = best_s(kSmall);
  return {start_s, (best_s(kLarge) - start_s) / double(kLarge)};
}

// In place. Throws what ends the epoch, as cancelling does.
void run_now(Engine& engine, const Cancellation* cancellation, Kind kind, const char* name, DType dtype, void* data,
             int64_t count) {
  RequestForm form(kind, name);
  form.what.op = ReduceOp::max;
  form.add_tensor({dtype, {count}}, data, data);
  const auto request = std::make_shared<Request>(std::move(form));
  engine.submit(request, true);
  while (!engine.wait(*request, now_ns() + kLookNs))
    if (cancellation && cancellation->cancelled()) engine.abort(cancellation->why().what());
  if (request->code == Code::ok) return;
  if (cancellation && cancellation->cancelled()) throw cancellation->why();
  const std::string failure = engine.failure();
  throw Error(request->code, "init: " + (failure.empty() ? request->text : failure));
}

class Measurement {
 public:
  Measurement(Engine& engine, const Deadline& deadline) : engine_(engine), deadline_(deadline) {}

  // nullopt, on all ranks alike: one of them could not.
  std::optional<Slowest> run() {
    const Topology& topology = engine_.topology();
    const auto& here = topology.hosts[size_t(topology.host_of[size_t(engine_.world().rank)])];
    slowest_[kMemory] = 1 / (copied_bytes_per_s() * double(here.size()));
    // One connection between two hosts, then one of each rank at the same time.
    with_neighbours(1, [&](LinkProbe& end, int) {
      return keep(kLatency, end.latency_s()) && keep(kConnection, seconds_a_byte(end, 1));
    });
    bool all_have = agree();
    if (all_have) {
      with_neighbours(SIZE_MAX, [&](LinkProbe& end, int pairs) { return keep(kNic, seconds_a_byte(end, pairs)); });
      all_have = agree();
    }
    engine_.with_peers([&](Peers& peers) {
      links_.clear();
      peers.reset_group(kProbeGroup);
    });
    return all_have ? std::optional(slowest_) : std::nullopt;
  }

 private:
  // probe: with the counterpart on a neighbouring host, and the number of such pairs of the two; at most so many.
  template <class Probe> void with_neighbours(size_t most_pairs, Probe probe) {
    engine_.with_peers([&](Peers& peers) {
      const Topology& topology = peers.topology();
      const int host = topology.host_of[size_t(peers.rank())], local = peers.local_index(peers.rank());
      for (int round = 0; round < kProbeRounds && slowest_[kFailed] == 0; ++round) {
        const int other = probe_partner(host, int(topology.hosts.size()), round);
        if (other < 0) continue;
        const auto& theirs = topology.hosts[size_t(other)];
        const size_t pairs = std::min({theirs.size(), peers.ranks_on_this_host().size(), most_pairs});
        if (size_t(local) >= pairs) continue;
        const int peer = theirs[size_t(local)];
        auto& link = links_[peer];
        if (!link) link = peers.data_link(kProbeGroup, local, peer);  // lanes are dealt out to NICs
        LinkProbe end(peers, *link, peers.rank() < peer, deadline_);
        if (!probe(end, int(pairs))) slowest_[kFailed] = 1;
      }
    });
  }

  static std::optional<double> seconds_a_byte(LinkProbe& end, int pairs) {
    const auto rate = end.bytes_per_s();
    return rate ? std::optional(1 / (*rate * pairs)) : std::nullopt;
  }

  bool keep(size_t what, std::optional<double> seconds) {
    if (seconds) slowest_[what] = std::max(slowest_[what], *seconds);
    return seconds.has_value();
  }

  bool agree() {
    run_now(engine_, deadline_.cancellation, Kind::allreduce, "lightcc.network", DType::float64, slowest_.data(),
            kMeasured);
    return slowest_[kFailed] == 0;
  }

  Engine& engine_;
  const Deadline deadline_;
  Slowest slowest_{};
  std::map<int, std::unique_ptr<Link>> links_;  // by peer
};

}  // namespace

void calibrate(Engine& engine, const Cancellation* cancellation, uint64_t longest_ns) {
  const Config& config = engine.config();
  const Topology& topology = engine.topology();
  if (!config.calibration || topology.hosts.size() < 2 || config.intra_size != 0) return;
  const uint64_t begin = now_ns();
  const bool decides = engine.world().rank == 0;
  CacheFile cache;
  std::optional<Cluster> cluster;
  if (decides) {
    engine.with_peers([&](Peers& peers) {
      cache = CacheFile::of(config.cache_dir, hosts_subject(peers, config));
    });
    if (const auto known = cache.get(kCached)) cluster = cluster_of(*known, topology);
  }
  std::array<char, kTextBytes> text{};  // what was measured, a line end, the rules; nothing: it is not known
  const auto tell = [&] {
    if (cluster) {
      const std::string rules = text_of(cost_model_rules(*cluster, config.hierarchical));
      (written(*cluster) + '\n' + rules).copy(text.data(), kTextBytes - 1);
    }
    run_now(engine, cancellation, Kind::broadcast, "lightcc.rules", DType::uint8, text.data(), kTextBytes);
    return text[0] != 0;
  };
  bool known = tell();
  if (!known) {
    const auto slowest = Measurement(engine, {begin + longest_ns, cancellation}).run();
    if (decides && slowest) {
      cluster = cluster_of(*slowest, topology);
      cache.put(kCached, written(*cluster));
    }
    known = tell();
  }
  if (known) {
    const std::string all = text.data();
    const size_t line_end = std::min(all.find('\n'), all.size());
    const Cluster measured = cluster_of(all.substr(0, line_end), topology).value_or(Cluster{});
    engine.use({parse_allreduce_rules(all.substr(line_end)), decides ? plan_costs(measured) : PlanCosts{},
                json_of(measured)});
  }
  engine.reset_counters();
  if (decides)
    log(Level::info, "calibration took " + std::to_string((now_ns() - begin) / 1'000'000) + " ms: " +
                         (known ? engine.selector_text() : "the network could not be measured"));
}

}  // namespace lightcc
