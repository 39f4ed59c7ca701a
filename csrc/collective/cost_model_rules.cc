#include "collective/cost_model_rules.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "collective/cost/cost.h"
#include "collective/node_links.h"

namespace lightcc {
namespace {

// Sizes that are priced: 2^k bytes, for those from that to twice as many. Larger ones are as the last, smaller ones as
// the first. Of more ranks than that every other k, as their prices take their time.
constexpr int kFirstClass = 10, kLastClass = 30;
constexpr int kManyRanks = 2048;

struct Way {
  const char* backend;
  const char* algorithm;
  bool operator==(const Way&) const = default;
};
// The preferred ones of those that are alike: each byte crosses the network once; and few rounds, pipelined.
constexpr Way kWays[] = {
    {"2d", "pairwise"},    {"2d", "halving_doubling"},    {"2d", "ring"},    {"2d", "recursive_doubling"},
    {"links", "pairwise"}, {"links", "halving_doubling"}, {"links", "ring"}, {"links", "recursive_doubling"}};

struct Priced { const Way* way; double seconds; };

const Way* way_of(std::string_view backend, std::string_view algorithm) {
  const Way* const found = std::ranges::find_if(
      kWays, [&](const Way& way) { return way.backend == backend && way.algorithm == algorithm; });
  return found == std::end(kWays) ? nullptr : found;
}

std::vector<Priced> prices(const Cluster& cluster, int64_t bytes, bool hierarchical) {
  std::vector<Priced> all;
  for (const Candidate& one : allreduce_candidates(cluster, bytes)) {
    const bool two_levels = one.algorithm == "2d";
    const std::string& algorithm = two_levels ? one.exchange : one.algorithm;
    const size_t owners = two_levels ? cluster.hosts.size() : size_t(cluster.ranks());
    if ((two_levels && !hierarchical) || (algorithm == "pairwise" && owners > size_t(kPairwiseOwners))) continue;
    if (owners == 2 && (algorithm == "ring" || algorithm == "halving_doubling")) continue;  // the same as pairwise
    if (const Way* way = way_of(two_levels ? "2d" : "links", algorithm)) all.push_back({way, one.price.seconds()});
  }
  return all;
}

const Way* take_best(std::vector<Priced>& all) {
  const double least = std::ranges::min_element(all, {}, &Priced::seconds)->seconds;
  const auto best = std::ranges::min_element(
      all, {}, [&](const Priced& one) { return std::pair(one.seconds > kAlike * least, one.way); });
  const Way* const way = best->way;
  all.erase(best);
  return way;
}

}  // namespace

std::vector<Rule> cost_model_rules(const Cluster& cluster, bool hierarchical) {
  struct SizeRange { int64_t most_bytes; const Way *best, *second; };
  std::vector<SizeRange> ranges;
  for (int k = kFirstClass; k <= kLastClass; k += cluster.ranks() > kManyRanks ? 2 : 1) {
    std::vector<Priced> all = prices(cluster, int64_t(1) << k, hierarchical);
    if (all.empty()) return {};
    const Way* const best = take_best(all);
    const Way* const second = all.empty() ? nullptr : take_best(all);
    const int64_t most_bytes = k == kLastClass ? 0 : int64_t(2) << k;
    if (ranges.empty() || ranges.back().best != best || ranges.back().second != second)
      ranges.push_back({most_bytes, best, second});
    ranges.back().most_bytes = most_bytes;
  }
  std::vector<Rule> rules;
  for (const SizeRange& range : ranges)
    for (const Way* way : {range.best, range.second})
      if (way) rules.push_back({Kind::allreduce, 2, 0, range.most_bytes, way->backend, way->algorithm});
  return rules;
}

std::string text_of(std::span<const Rule> rules) {
  std::string text;
  for (const Rule& rule : rules)
    text += std::to_string(rule.most_bytes) + " " + rule.backend + "/" + rule.algorithm + " ";
  return text;
}

std::vector<Rule> parse_allreduce_rules(std::string_view text) {
  std::istringstream words{std::string(text)};
  std::vector<Rule> rules;
  std::string bytes, name;
  while (words >> bytes) {
    int64_t most_bytes = -1;
    const auto [end, error] = std::from_chars(bytes.data(), bytes.data() + bytes.size(), most_bytes);
    const bool is_number = error == std::errc() && end == bytes.data() + bytes.size() && most_bytes >= 0;
    words >> name;
    const size_t slash = std::min(name.find('/'), name.size());
    const Way* const way = way_of(name.substr(0, slash), name.substr(std::min(slash + 1, name.size())));
    if (!is_number || !way)
      throw Error(Code::internal, "rank 0 sent a rule that is not understood: " + bytes + " " + name);
    rules.push_back({Kind::allreduce, 2, 0, most_bytes, way->backend, way->algorithm});
  }
  return rules;
}

}  // namespace lightcc
