#include "collective/cost/cluster.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "base/error.h"

namespace lightcc {
namespace {

// Resources of a host stand side by side, those of pods behind all of them.
enum HostResource { kMemory, kNicOut, kNicIn, kHostResources };
enum PodResource { kUplink, kDownlink, kPodResources };

// A message inside a host is written once and read once; one between hosts crosses the memory of both.
// The rank that adds it to its own data reads those and writes the sum.
constexpr double kLocalTouches = 2, kRemoteTouches = 1, kAddTouches = 2;

}  // namespace

void Cluster::check() const {
  const auto refuse = [](const std::string& what) { throw Error(Code::invalid_argument, "a cluster: " + what); };
  if (hosts.empty()) refuse("hosts: there is none");
  for (int ranks : hosts)
    if (ranks < 1) refuse("hosts: a host has at least 1 rank, not " + std::to_string(ranks));
  const auto positive = [&](const char* name, double value) {
    if (!(value > 0 && value < std::numeric_limits<double>::infinity()))
      refuse(std::string(name) + " has to be above 0, not " + std::to_string(value));
  };
  const auto no_less = [&](const char* name, double value, double least) {
    if (!(value >= least && value < std::numeric_limits<double>::infinity()))
      refuse(std::string(name) + " has to be at least " + std::to_string(least) + ", not " + std::to_string(value));
  };
  no_less("local_latency_s", local_latency_s, 0);
  no_less("latency_s", latency_s, 0);
  no_less("message_s", message_s, 0);
  positive("memory_bytes_per_s", memory_bytes_per_s);
  positive("nic_bytes_per_s", nic_bytes_per_s);
  no_less("nics", nics, 1);
  no_less("flow_bytes_per_s", flow_bytes_per_s, 0);
  no_less("pod_hosts", pod_hosts, 0);
  no_less("oversubscription", oversubscription, 1);
}

int Cluster::ranks() const { return std::accumulate(hosts.begin(), hosts.end(), 0); }

int Cluster::most_ranks_of_host() const { return *std::max_element(hosts.begin(), hosts.end()); }

Cluster Cluster::by_host() const {
  Cluster one = *this;
  one.hosts.assign(hosts.size(), 1);
  return one;
}

Resources::Resources(const Cluster& cluster) : cluster_(cluster) {
  const double host_bytes_per_s = cluster.nics * cluster.nic_bytes_per_s;
  for (size_t host = 0; host < cluster.hosts.size(); ++host) {
    host_of_.insert(host_of_.end(), size_t(cluster.hosts[host]), int(host));
    bytes_per_s_.insert(bytes_per_s_.end(), {cluster.memory_bytes_per_s, host_bytes_per_s, host_bytes_per_s});
  }
  const int hosts = int(cluster.hosts.size());
  for (int pod = 0; pod <= pod_of(hosts - 1); ++pod) {
    const int first = pod * cluster.pod_hosts;
    const int members = cluster.pod_hosts > 0 ? std::min(cluster.pod_hosts, hosts - first) : hosts;
    const double uplink = members * host_bytes_per_s / cluster.oversubscription;
    bytes_per_s_.insert(bytes_per_s_.end(), {uplink, uplink});
  }
}

Resources::Path Resources::path(int from_rank, int to_rank, bool added) const {
  const int from = host_of(from_rank), to = host_of(to_rank);
  Path path;
  const double add = added ? kAddTouches : 0, local = kLocalTouches + add;
  if (from == to) {
    path.add(from * kHostResources + kMemory, local);
    path.latency_s = cluster_.local_latency_s;
    path.most_bytes_per_s = cluster_.memory_bytes_per_s / local;
    return path;
  }
  path.add(from * kHostResources + kMemory, kRemoteTouches);
  path.add(to * kHostResources + kMemory, kRemoteTouches + add);
  path.add(from * kHostResources + kNicOut, 1);
  path.add(to * kHostResources + (cluster_.duplex ? kNicIn : kNicOut), 1);
  if (const int out = pod_of(from), in = pod_of(to); out != in) {
    const int pods = int(cluster_.hosts.size()) * kHostResources;
    path.add(pods + out * kPodResources + kUplink, 1);
    path.add(pods + in * kPodResources + kDownlink, 1);
  }
  path.latency_s = cluster_.latency_s;
  path.most_bytes_per_s = cluster_.nic_bytes_per_s;
  if (cluster_.flow_bytes_per_s > 0) path.most_bytes_per_s = std::min(path.most_bytes_per_s, cluster_.flow_bytes_per_s);
  return path;
}

const char* Resources::name(int resource) const {
  constexpr const char* kOfHost[] = {"memory", "NIC out", "NIC in"};
  constexpr const char* kOfPod[] = {"pod uplink", "pod downlink"};
  const int pods = int(cluster_.hosts.size()) * kHostResources;
  if (resource < pods) {
    if (!cluster_.duplex && resource % kHostResources == kNicOut) return "NIC";
    return kOfHost[resource % kHostResources];
  }
  return kOfPod[(resource - pods) % kPodResources];
}

}  // namespace lightcc
