#include "collective/cost/cost.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "base/error.h"
#include "collective/algorithms.h"
#include "collective/cost/flows.h"
#include "collective/cost/simulate.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr const char* kAlgorithms[] = {"ring", "pairwise", "recursive_doubling", "halving_doubling"};

Cluster cluster_of(int hosts, int ranks) {
  Cluster cluster;
  cluster.hosts.assign(size_t(hosts), ranks);
  return cluster;
}

// Nothing takes time but the NICs.
Cluster slow_nics(int hosts, int ranks, double bytes_per_s) {
  Cluster cluster = cluster_of(hosts, ranks);
  cluster.local_latency_s = cluster.latency_s = cluster.message_s = 0;
  cluster.memory_bytes_per_s = 1e15;
  cluster.nic_bytes_per_s = bytes_per_s;
  return cluster;
}

const Candidate& find(const std::vector<Candidate>& all, const std::string& algorithm,
                      const std::string& exchange = "") {
  for (const Candidate& one : all)
    if (one.algorithm == algorithm && one.exchange == exchange) return one;
  throw std::out_of_range(algorithm);
}

double seconds(const Cluster& cluster, int64_t bytes, const char* algorithm, const char* exchange = "") {
  return find(allreduce_candidates(cluster, bytes), algorithm, exchange).price.seconds();
}

// ---- traffic

using Sent = std::map<std::pair<int, int>, std::vector<double>>;  // bytes from a rank to another, in their order

// count: elements of the vector, for an all-gather of each block.
Sent sent_by_schedules(Kind kind, const char* name, int ranks, int64_t count) {
  Sent sent;
  for (int rank = 0; rank < ranks; ++rank) {
    Collective c{};
    c.kind = kind;
    if (kind == Kind::allgather) c.counts.assign(size_t(ranks), count);
    c.index = rank;
    c.size = ranks;
    c.dtype = DType::float32;
    c.count = count;
    for (const auto& round : plan(*find_algorithm(kind, name), c, one_host(ranks)))
      for (const Step& step : round)
        if (step.kind == Step::Action::send) sent[{rank, step.peer}].push_back(double(4 * step.count));
  }
  return sent;
}

Sent sent_by_rule(const Traffic& traffic) {
  Sent sent;
  std::vector<Message> messages;
  for (const Round& round : traffic.rounds)
    for (int64_t repeat = 0; repeat < round.repeats; ++repeat)
      for (int rank = 0; rank < traffic.ranks; ++rank) {
        messages.clear();
        round.messages(rank, &messages);
        for (const Message& message : messages) sent[{rank, message.to}].push_back(message.bytes);
      }
  return sent;
}

TEST(Traffic, IsWhatTheAlgorithmsSend) {
  for (const char* name : kAlgorithms)
    for (int ranks : {1, 2, 3, 4, 5, 7, 8, 12, 16, 17}) {
      int power = 1;
      while (power * 2 <= ranks) power *= 2;
      const int64_t count = std::lcm(ranks, power) * 6;  // cut without a rest
      EXPECT_EQ(sent_by_rule(allreduce_traffic(name, ranks, double(4 * count))),
                sent_by_schedules(Kind::allreduce, name, ranks, count)) << name << " " << ranks;
    }
  const auto in_one_piece = [](Sent sent) {  // what wraps round the end of the vector leaves in two
    for (auto& [pair, bytes] : sent) bytes = {std::accumulate(bytes.begin(), bytes.end(), 0.)};
    return sent;
  };
  for (const char* name : {"ring", "bruck"})
    for (int ranks : {1, 2, 3, 5, 8, 13})
      EXPECT_EQ(in_one_piece(sent_by_rule(allgather_traffic(name, ranks, 4 * 6))),
                in_one_piece(sent_by_schedules(Kind::allgather, name, ranks, 6))) << name << " " << ranks;
}

TEST(Traffic, OfAnUnknownAlgorithmIsRefused) { 
  EXPECT_THROW(allreduce_traffic("torus", 4, 1), Error);
  EXPECT_THROW(allgather_traffic("torus", 4, 1), Error);
}

// ---- fair sharing

TEST(FairSharing, AllGetTheSameOfWhatTheyShareAndTheRestOfTheOthers) {
  const Cluster cluster = slow_nics(3, 2, 90);
  const Resources resources(cluster);
  FairSharing sharing(resources);
  // Three out of host 0, of which two go into host 1; one more into host 1, and one that meets nobody on its way out.
  std::vector<NetworkFlow> flows;
  for (auto [from, to] : {std::pair{0, 2}, {1, 3}, {0, 4}, {4, 2}}) flows.push_back({resources.path(from, to)});
  std::vector<NetworkFlow*> all;
  for (NetworkFlow& flow : flows) all.push_back(&flow);
  sharing.share(all);
  EXPECT_NEAR(flows[0].bytes_per_s, 30, 1e-3);
  EXPECT_NEAR(flows[1].bytes_per_s, 30, 1e-3);
  EXPECT_NEAR(flows[2].bytes_per_s, 30, 1e-3);
  EXPECT_NEAR(flows[3].bytes_per_s, 30, 1e-3);
  all.erase(all.begin());
  sharing.share(all);
  EXPECT_NEAR(flows[1].bytes_per_s, 45, 1e-3);
  EXPECT_NEAR(flows[2].bytes_per_s, 45, 1e-3);
  EXPECT_NEAR(flows[3].bytes_per_s, 45, 1e-3);
  flows[3].path.most_bytes_per_s = 10;
  sharing.share(all);
  EXPECT_NEAR(flows[3].bytes_per_s, 10, 1e-3);
  EXPECT_NEAR(flows[1].bytes_per_s, 45, 1e-3);
  all.erase(all.begin() + 1);
  sharing.share(all);
  EXPECT_NEAR(flows[1].bytes_per_s, 80, 1e-3);
}

// ---- prices

constexpr int64_t kMiB = 1 << 20;

TEST(Cost, BytesAreThoseOfTheFormulas) {
  const double rate = 119.4e6, bytes = 64 * kMiB;
  EXPECT_NEAR(seconds(slow_nics(4, 2, rate), 64 * kMiB, "ring"), 2 * 7. / 8 * bytes / rate, 1e-6);
  EXPECT_NEAR(seconds(slow_nics(2, 2, rate), 64 * kMiB, "ring"), 2 * 3. / 4 * bytes / rate, 1e-6);
  for (const char* exchange : {"ring", "pairwise", "halving_doubling"}) {
    EXPECT_NEAR(seconds(slow_nics(4, 2, rate), 64 * kMiB, "2d", exchange), 2 * 3. / 4 * bytes / rate, 1e-6);
    EXPECT_NEAR(seconds(slow_nics(2, 2, rate), 64 * kMiB, "2d", exchange), bytes / rate, 1e-6);
  }
  EXPECT_NEAR(seconds(slow_nics(8, 1, rate), kMiB, "recursive_doubling"), 3 * kMiB / rate, 1e-6);
}

// The latency parts of ALGORITHMS: 2(N-1) and 2(P-N) start-ups of a ring, 2 log2 N by halves.
TEST(Cost, StartUpsAreThoseOfTheFormulas) {
  Cluster cluster = cluster_of(12'500, 8);
  cluster.message_s = 0;
  cluster.latency_s = 14e-6;
  cluster.local_latency_s = 3.4e-6;
  const auto all = allreduce_candidates(cluster, 1);
  EXPECT_NEAR(find(all, "ring").price.latency_s, 2 * 12'499 * 14e-6 + 2 * 87'500 * 3.4e-6, 1e-4);
  EXPECT_NEAR(find(all, "2d", "ring").price.latency_s, 2 * 12'499 * 14e-6, 1e-4);
  EXPECT_NEAR(find(all, "2d", "halving_doubling").price.latency_s, (2 * 13 + 2) * 14e-6, 2e-5);
}

TEST(Cost, RingsLoseBeyondAThousandHosts) {
  for (int hosts : {1'500, 5'000, 12'500})
    for (int64_t bytes : {4 * kMiB, 64 * kMiB}) {
      const auto all = allreduce_candidates(cluster_of(hosts, 8), bytes);
      EXPECT_NE(all[0].algorithm, "ring") << hosts;
      EXPECT_NE(all[0].exchange, "ring") << hosts;
    }
}

TEST(Cost, WhatLimitsIsNamed) {
  Cluster cluster = slow_nics(16, 4, 3e9);
  const auto bound = [&] { return find(allreduce_candidates(cluster, 64 * kMiB), "2d", "ring").price.bound_by; };
  EXPECT_EQ(bound(), "NIC out");
  const double whole = seconds(cluster, 64 * kMiB, "2d", "ring");
  cluster.pod_hosts = 4;
  cluster.oversubscription = 8;  // a ring crosses each pod's border with one host's bytes of four: half as fast
  EXPECT_EQ(bound(), "pod uplink");
  EXPECT_NEAR(seconds(cluster, 64 * kMiB, "2d", "ring"), 2 * whole, whole / 100);
  cluster.pod_hosts = 0;
  cluster.flow_bytes_per_s = 0.3e9;  // of four lanes: 1.2e9 of 3e9
  EXPECT_EQ(bound(), "one connection");
  EXPECT_NEAR(seconds(cluster, 64 * kMiB, "2d", "ring"), 2.5 * whole, whole / 100);
  cluster.flow_bytes_per_s = 0;
  cluster.duplex = false;
  EXPECT_EQ(bound(), "NIC");
  EXPECT_NEAR(seconds(cluster, 64 * kMiB, "2d", "ring"), 2 * whole, whole / 100);
  cluster.memory_bytes_per_s = 1e8;
  EXPECT_EQ(bound(), "memory");
}

TEST(Cost, ACodecMovesItsShareOfTheBytesBetweenHosts) {
  const Cluster cluster = slow_nics(4, 2, 1e8);
  const auto all = allreduce_candidates(cluster, 64 * kMiB, {.compressed_share = 0.02});
  // Each host gets the messages of three others.
  EXPECT_NEAR(find(all, "compressed", "ring").price.seconds(), 3 * 0.02 * 64 * kMiB / 1e8, 1e-6);
  EXPECT_EQ(all[0].algorithm, "compressed");
  EXPECT_THROW(find(allreduce_candidates(cluster, kMiB), "compressed", "ring"), std::out_of_range);
}

TEST(Cost, SumsCostMemoryAndCopiesLess) {
  Cluster cluster = slow_nics(1, 4, 1e15);
  cluster.memory_bytes_per_s = 1e9;
  // Of four ranks' blocks in three rounds: write, read, and read and write the sum; then without the sum.
  EXPECT_NEAR(seconds(cluster, 4'000'000, "ring"), 3 * 4e6 * (4 + 2) / 1e9, 1e-9);
  // All read all inputs and write sums; three copy what the owner has.
  EXPECT_NEAR(seconds(cluster, 4'000'000, "shared"), 4e6 * (5 + 6) / 1e9, 1e-9);
}

TEST(Cost, WhatCrossesTheNetworkMayGoMessageByMessage) {
  Cluster cluster = cluster_of(4, 2);
  for (const Candidate& one : allreduce_candidates(cluster, 8 * kMiB, {.simulated = true}))
    EXPECT_NEAR(one.price.seconds() / seconds(cluster, 8 * kMiB, one.algorithm.c_str(), one.exchange.c_str()), 1, 0.15)
        << one.algorithm << " " << one.exchange;
  EXPECT_THROW(allreduce_candidates(cluster_of(5'000, 1), 1, {.simulated = true}), Error);
}

TEST(Cost, AClusterThatCannotBeIsRefusedByField) {
  const auto refusal = [](auto change) -> std::string {
    Cluster cluster = cluster_of(2, 2);
    change(cluster);
    try {
      allreduce_candidates(cluster, 1);
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(refusal([](Cluster& c) { c.hosts.clear(); }).find("hosts"), std::string::npos);
  EXPECT_NE(refusal([](Cluster& c) { c.hosts[1] = 0; }).find("hosts"), std::string::npos);
  EXPECT_NE(refusal([](Cluster& c) { c.nic_bytes_per_s = 0; }).find("nic_bytes_per_s"), std::string::npos);
  EXPECT_NE(refusal([](Cluster& c) { c.latency_s = -1; }).find("latency_s"), std::string::npos);
  EXPECT_NE(refusal([](Cluster& c) { c.oversubscription = 0.5; }).find("oversubscription"), std::string::npos);
}

// ---- message by message

// Where two limits are near each other the closed form takes the larger alone: hence no closer.
TEST(Simulation, AgreesWithTheClosedForm) {
  for (auto [hosts, ranks] : {std::pair{2, 1}, {2, 2}, {4, 2}, {8, 4}, {16, 1}})
    for (const char* name : kAlgorithms)
      for (int64_t bytes : {int64_t(1) << 10, kMiB, 64 * kMiB}) {
        const Cluster cluster = cluster_of(hosts, ranks);
        const Traffic traffic = allreduce_traffic(name, cluster.ranks(), double(bytes));
        const double closed = price(traffic, cluster).seconds(), simulated = simulate(traffic, cluster);
        EXPECT_NEAR(simulated / closed, 1, 0.15) << name << " of " << bytes << " on " << hosts << "x" << ranks;
      }
}

TEST(Simulation, LanesShareANic) {
  const Cluster one = slow_nics(4, 1, 1e8);
  const Traffic traffic = allreduce_traffic("ring", 4, 1e6);
  EXPECT_NEAR(simulate(traffic, one, 2), 2 * simulate(traffic, one), 1e-6);
  EXPECT_NEAR(simulate(traffic, one), 1.5 * 1e6 / 1e8, 1e-6);
}

TEST(Simulation, OneSlowHostHoldsUpARing) {
  Cluster cluster = slow_nics(4, 1, 1e8);
  cluster.hosts = {1, 4, 1, 1};
  const Traffic traffic = allreduce_traffic("ring", 7, 7e6);
  EXPECT_NEAR(simulate(traffic, cluster), 12 * 1e6 / 1e8, 1e-4);
}

}  // namespace
}  // namespace lightcc
