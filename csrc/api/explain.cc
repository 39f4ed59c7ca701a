// The C API for lightcc-explain: what the cost model says of a cluster. No engine is needed.
#include <cstdio>

#include "api/global_state.h"
#include "api/lightcc.h"
#include "api/read_request.h"
#include "collective/cost/cost.h"
#include "net/bootstrap/world.h"
#include "net/topology.h"

namespace lightcc {
namespace {

constexpr int32_t kMostHosts = 1 << 20;

static_assert(sizeof(lightcc_cluster) == kClusterSizes[0]);

Cluster cluster_of(const lightcc_cluster& asked) {
  if (asked.host_count < 1 || asked.host_count > kMostHosts || !asked.hosts)
    refuse("lightcc_cluster.host_count is " + std::to_string(asked.host_count) + ": from 1 to " +
           std::to_string(kMostHosts) + ", with the ranks of each in hosts");
  Cluster cluster;
  cluster.hosts.assign(asked.hosts, asked.hosts + asked.host_count);
  cluster.local_latency_s = asked.local_latency_s;
  cluster.memory_bytes_per_s = asked.memory_bytes_per_s;
  cluster.latency_s = asked.latency_s;
  cluster.message_s = asked.message_s;
  cluster.nics = asked.nics;
  cluster.nic_bytes_per_s = asked.nic_bytes_per_s;
  cluster.duplex = !asked.half_duplex;
  cluster.flow_bytes_per_s = asked.flow_bytes_per_s;
  cluster.pod_hosts = asked.pod_hosts;
  cluster.oversubscription = asked.oversubscription;
  return cluster;
}

// No text in it needs to be escaped.
std::string json_of(const Candidate& one) {
  char numbers[200];
  std::snprintf(numbers, sizeof numbers,
                "\"lanes\": %d, \"chunks\": %lld, \"seconds\": %.9g, \"latency_s\": %.9g, \"transfer_s\": %.9g, "
                "\"local_s\": %.9g",
                one.lanes, static_cast<long long>(one.chunks), one.price.seconds(), one.price.latency_s,
                one.price.transfer_s, one.price.local_s);
  return "{\"algorithm\": \"" + one.algorithm + "\", \"exchange\": \"" + one.exchange + "\", " + numbers +
         ", \"bound_by\": \"" + one.price.bound_by + "\"}";
}

}  // namespace
}  // namespace lightcc

const char* lightcc_explain(const lightcc_cluster* caller, int64_t bytes) {
  using namespace lightcc;
  thread_local std::string text;
  const int status = guard([&] {
    if (!caller) refuse("lightcc_cluster is NULL");
    lightcc_cluster asked;
    read_struct(&asked, caller, caller->size, kClusterSizes, "lightcc_cluster.size");
    const PriceOptions options{.compressed_share = asked.compressed_share, .simulated = asked.simulated != 0};
    text.clear();
    for (const Candidate& one : allreduce_candidates(cluster_of(asked), bytes, options))
      text += (text.empty() ? "[" : ", ") + json_of(one);
    text += text.empty() ? "[]" : "]";
    return 0;
  });
  return status == 0 ? text.c_str() : nullptr;
}
