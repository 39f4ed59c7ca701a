#include "collective/cost/cost.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "collective/cost/simulate.h"

namespace lightcc {
namespace {

// What goes straight from everyone to everyone is no choice beyond so many: its messages grow with their square.
constexpr int kPairwiseRanks = 512;
// Event by event larger jobs take minutes.
constexpr int kSimulatedRanks = 4096;
constexpr double kInstantBytes = 1e24;  // a second
constexpr double kOneLaneBytes = 256 << 10;           // as HierarchicalBackend has it
constexpr int64_t kCompressedPartBytes = 4 << 20;     // of gradients, that share messages
// What is left behind and the sum are read to find the threshold and once more to select; what stays is written.
constexpr double kCompressTouches = 5;
constexpr const char* kExchanges[] = {"pairwise", "ring", "recursive_doubling", "halving_doubling"};

// The loads of one round.
struct Load {
  double longest_latency_s = 0;
  double alone_s = 0;        // of all messages, as if each had its path to itself, one after the other
  double slowest_message_s = 0;
  double busiest_s = 0;
  int busiest = -1;
};

class Pricing {
 public:
  Pricing(const Cluster& cluster, double together)
      : resources_(cluster), message_s_(cluster.message_s), together_(together),
        bytes_(resources_.bytes_per_s().size(), 0) {}

  Load of(const Round& round, int ranks) {
    std::fill(bytes_.begin(), bytes_.end(), 0);
    Load load;
    for (int rank = 0; rank < ranks; ++rank) {
      messages_.clear();
      round.messages(rank, &messages_);
      double latency_s = 0;
      for (const Message& message : messages_) latency_s = std::max(latency_s, add(rank, message, &load));
      latency_s += message_s_ * double(messages_.size());
      load.longest_latency_s = std::max(load.longest_latency_s, latency_s);
      load.alone_s += latency_s;
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      const double seconds = bytes_[i] / resources_.bytes_per_s()[i];
      if (seconds > load.busiest_s) {
        load.busiest_s = seconds;
        load.busiest = int(i);
      }
    }
    return load;
  }
  const char* name(int resource) const { return resources_.name(resource); }

 private:
  // Returns the message's latency.
  double add(int rank, const Message& message, Load* load) {
    const Resources::Path path = resources_.path(rank, message.to, message.added);
    for (int use = 0; use < path.count; ++use)
      bytes_[size_t(path.uses[use].resource)] += message.bytes * path.uses[use].weight * together_;
    const double message_s = message.bytes / path.most_bytes_per_s;
    load->slowest_message_s = std::max(load->slowest_message_s, message_s);
    load->alone_s += message_s;
    return path.latency_s;
  }

  const Resources resources_;
  const double message_s_, together_;
  std::vector<double> bytes_;  // by resource
  std::vector<Message> messages_;
};

// Bytes of a host's memory for each byte of the vector, where all map the inputs: the owner of a shard reads all of
// them and writes the sum (reduce-scatter), all copy what others own (all-gather).
double reduce_touches(int ranks) { return ranks == 1 ? 0 : ranks + 1; }
double gather_touches(int ranks) { return 2.0 * (ranks - 1); }

Price on_one_host(const Cluster& cluster, double bytes) {
  const int ranks = cluster.hosts[0];
  const double touched = bytes * (reduce_touches(ranks) + gather_touches(ranks));
  return {2 * cluster.local_latency_s, 0, touched / cluster.memory_bytes_per_s, "memory"};
}

Price network_price(const Traffic& traffic, const Cluster& cluster, double together, bool simulated) {
  Price price = lightcc::price(traffic, cluster, together);
  if (!simulated) return price;
  Cluster instant = cluster;  // on which only start-ups take time
  instant.memory_bytes_per_s = instant.nic_bytes_per_s = kInstantBytes;
  instant.flow_bytes_per_s = 0;
  const double seconds = simulate(traffic, cluster, together);
  price.latency_s = std::min(seconds, simulate(traffic, instant, together));
  price.transfer_s = seconds - price.latency_s;
  return price;
}

// Chunks pass through queues that work at the same time: the first chunk pays for all of them, each other for the
// slowest. Some chunks of a lane are under way between hosts, so its latency is paid once. local_s: of a chunk, in each
// queue that works on the host.
Price through_queues(const Cluster& cluster, Price network, const std::vector<double>& local_s, int64_t chunks) {
  const double all_s = std::accumulate(local_s.begin(), local_s.end(), network.transfer_s);
  const double slowest_s = std::max(network.transfer_s, *std::max_element(local_s.begin(), local_s.end()));
  Price price = network;
  if (cluster.most_ranks_of_host() > 1) price.latency_s += 2 * cluster.local_latency_s;
  price.transfer_s = network.transfer_s * double(chunks);
  price.local_s = all_s + slowest_s * double(chunks - 1) - price.transfer_s;
  if (slowest_s > network.transfer_s) price.bound_by = "memory";
  return price;
}

Candidate in_two_levels(const Cluster& cluster, double bytes, const PriceOptions& options, const char* exchange) {
  const int ranks = cluster.most_ranks_of_host();
  Candidate one{"2d", exchange, bytes <= kOneLaneBytes ? 1 : ranks, 1, {}};
  one.chunks = std::max<int64_t>(1, int64_t(bytes) / (options.chunk_bytes * one.lanes));
  const double chunk = bytes / double(one.chunks);
  const Traffic traffic = allreduce_traffic(exchange, int(cluster.hosts.size()), chunk / one.lanes);
  const Price network = network_price(traffic, cluster.by_host(), one.lanes, options.simulated);
  const double second_s = 1 / cluster.memory_bytes_per_s;
  one.price = through_queues(cluster, network,
                             {chunk * reduce_touches(ranks) * second_s, chunk * gather_touches(ranks) * second_s},
                             one.chunks);
  return one;
}

// As in_two_levels, with messages of a codec between the hosts: each owner has those of all hosts.
Candidate compressed(const Cluster& cluster, double bytes, const PriceOptions& options, const char* exchange) {
  const int ranks = cluster.most_ranks_of_host(), hosts = int(cluster.hosts.size());
  Candidate one{"compressed", exchange, ranks, 1, {}};
  one.chunks = std::max<int64_t>(1, int64_t(bytes) / kCompressedPartBytes);
  const double chunk = bytes / double(one.chunks), message = chunk * options.compressed_share;
  const Traffic traffic = allgather_traffic(exchange, hosts, message / ranks);
  const Price network = network_price(traffic, cluster.by_host(), ranks, options.simulated);
  const double second_s = 1 / cluster.memory_bytes_per_s;
  one.price = through_queues(cluster, network,
                             {chunk * reduce_touches(ranks) * second_s, chunk * kCompressTouches * second_s,
                              (chunk + hosts * message) * second_s, chunk * gather_touches(ranks) * second_s},
                             one.chunks);
  return one;
}

bool is_a_choice(const char* algorithm, int ranks) {
  return std::string_view(algorithm) != "pairwise" || ranks <= kPairwiseRanks;
}

}  // namespace

Price price(const Traffic& traffic, const Cluster& cluster, double together) {
  Pricing pricing(cluster, together);
  Price price;
  double most_s = -1;
  for (const Round& round : traffic.rounds) {
    const Load load = pricing.of(round, traffic.ranks);
    const double repeats = double(round.repeats);
    const double transfer_s = std::max(load.busiest_s, load.slowest_message_s) * repeats;
    // On a ring a block's way takes all latencies and transfers one after the other, a round the mean of them: unless
    // what carries the most needs longer.
    const double latency_s =
        round.chained ? load.alone_s / traffic.ranks - transfer_s / repeats : load.longest_latency_s;
    price.latency_s += std::max(0.0, latency_s) * repeats;
    price.transfer_s += transfer_s;
    if (transfer_s <= most_s) continue;
    most_s = transfer_s;
    price.bound_by = load.slowest_message_s > load.busiest_s ? "one connection" : pricing.name(load.busiest);
  }
  return price;
}

std::vector<Candidate> allreduce_candidates(const Cluster& cluster, int64_t bytes, const PriceOptions& options) {
  cluster.check();
  const int ranks = cluster.ranks(), hosts = int(cluster.hosts.size());
  const auto refuse = [](const std::string& what) { throw Error(Code::invalid_argument, what); };
  if (bytes < 0) refuse("an all-reduce of " + std::to_string(bytes) + " bytes");
  if (options.chunk_bytes <= 0) refuse("chunk_bytes has to be above 0, not " + std::to_string(options.chunk_bytes));
  if (!(options.compressed_share >= 0 && options.compressed_share < 1))
    refuse("compressed_share lies between 0 and 1, not at " + std::to_string(options.compressed_share));
  if (options.simulated && ranks > kSimulatedRanks)
    refuse(std::to_string(ranks) + " ranks are too many to go through message by message: at most " +
           std::to_string(kSimulatedRanks));
  std::vector<Candidate> all;
  if (hosts == 1) all.push_back({"shared", "", 1, 1, on_one_host(cluster, double(bytes))});
  for (const char* algorithm : kExchanges) {
    if (ranks > 1 && is_a_choice(algorithm, ranks))
      all.push_back({algorithm, "", 1, 1,
                     network_price(allreduce_traffic(algorithm, ranks, double(bytes)), cluster, 1, options.simulated)});
    if (hosts > 1 && is_a_choice(algorithm, hosts))
      all.push_back(in_two_levels(cluster, double(bytes), options, algorithm));
  }
  if (hosts > 1 && options.compressed_share > 0)
    for (const char* exchange : {"ring", "bruck"})
      all.push_back(compressed(cluster, double(bytes), options, exchange));
  std::stable_sort(all.begin(), all.end(),
                   [](const Candidate& a, const Candidate& b) { return a.price.seconds() < b.price.seconds(); });
  return all;
}

}  // namespace lightcc
