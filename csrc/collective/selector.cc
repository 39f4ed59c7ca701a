#include "collective/selector.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/text.h"

namespace lightcc {
namespace {

// Start-ups rule below, bytes above. Beyond about a thousand ranks a ring's start-ups cost more than bytes do.
constexpr int kRingRanks = 1024;
// The same bound by host, where rounds grow with hosts: about eight ranks a host.
constexpr int kByHostRanks = 8 * kRingRanks;
// Up to here it costs less to combine whole vectors on both ranks than to wait for halves, dot products and halves.
constexpr int64_t kAdasumWholeBytes = 64 << 10;
// Up to so many hosts a reduce-scatter by host keeps a sum of each in scratch; a ring keeps two.
constexpr size_t kSummedHosts = 64;
// Up to so many ranks a small all-gather is as quick by host as by Bruck's algorithm.
constexpr int kBurstRanks = 64;
constexpr Rule kRules[] = {  // what compresses goes first
    {Kind::allreduce, 2, 0, 0, "compressed", nullptr},
    {Kind::allreduce, 0, 0, 0, "2d", nullptr},
    {Kind::reducescatter, 2, 0, 0, "links", "by_host"},
    {Kind::allgather, 2, kBurstRanks, 0, "links", "by_host"},
    {Kind::broadcast, 2, 0, 0, "links", "by_host"},
    {Kind::allreduce, 0, 0, 0, "shared", nullptr},
    {Kind::reducescatter, 0, 0, 0, "shared", nullptr},
    {Kind::allgather, 0, 0, 0, "shared", nullptr},
    {Kind::broadcast, 0, 0, 0, "shared", nullptr},
    {Kind::alltoall, 0, 0, 0, "shared", nullptr},
    {Kind::allreduce, 0, 0, 8 << 10, "links", "recursive_doubling"},
    {Kind::allreduce, 0, 0, 512 << 10, "links", "halving_doubling"},
    {Kind::allreduce, 0, kRingRanks, 0, "links", "ring"},
    {Kind::allreduce, 0, 0, 0, "links", "halving_doubling"},
    {Kind::allreduce, 0, 0, kAdasumWholeBytes, "links", "adasum_whole"},
    {Kind::allreduce, 0, 0, 0, "links", "adasum_halving"},
    {Kind::reducescatter, 0, 0, 256 << 10, "links", "pairwise"},
    {Kind::reducescatter, 0, 0, 0, "links", "ring"},
    {Kind::allgather, 0, 0, 64 << 10, "links", "bruck"},
    {Kind::allgather, 2, kByHostRanks, 0, "links", "by_host"},
    {Kind::allgather, 0, kRingRanks, 0, "links", "ring"},
    {Kind::allgather, 0, 0, 0, "links", "bruck"},
    {Kind::broadcast, 0, 0, 0, "links", "binomial"},
    {Kind::alltoall, 0, 0, 0, "links", "pairwise"},
    {Kind::barrier, 0, 0, 0, "links", "dissemination"},
    {Kind::allreduce, 2, 0, 0, "nccl_compressed", nullptr, DeviceKind::cuda},
    {Kind::allreduce, 2, 0, 0, "nccl_2d", nullptr, DeviceKind::cuda},
    {Kind::allreduce, 0, 0, 0, "nccl", nullptr, DeviceKind::cuda},
    {Kind::reducescatter, 0, 0, 0, "nccl", nullptr, DeviceKind::cuda},
    {Kind::allgather, 0, 0, 0, "nccl", nullptr, DeviceKind::cuda},
    {Kind::broadcast, 0, 0, 0, "nccl", nullptr, DeviceKind::cuda},
    {Kind::alltoall, 0, 0, 0, "nccl", nullptr, DeviceKind::cuda},
};
constexpr Kind kDataKinds[] = {Kind::allreduce, Kind::reducescatter, Kind::allgather,
                               Kind::broadcast, Kind::alltoall,      Kind::barrier};

Backend* find_backend(std::span<Backend* const> backends, std::string_view name) {
  for (Backend* backend : backends)
    if (name == backend->name()) return backend;
  return nullptr;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

[[noreturn]] void refuse(std::string_view entry, const std::string& expected) {
  throw Error(Code::invalid_argument, "LIGHTCC_SELECT: \"" + shown(entry) + "\" is not understood; " + expected);
}

Kind parse_kind(std::string_view name, std::string_view entry) {
  std::string known;
  for (Kind kind : kDataKinds) {
    if (name == name_of(kind)) return kind;
    known += (known.empty() ? "" : ", ") + std::string(name_of(kind));
  }
  refuse(entry, "expected <kind>=<choice>[,...] with kind one of " + known);
}

struct Choice { std::string_view backend; const Algorithm* algorithm; };

// "ring", "links/ring", or a backend, which has only one way or finds its own: "2d", "2d/ring".
Choice parse_choice(Kind kind, std::string_view name, std::string_view entry, std::span<const Rule> rules) {
  std::string known;
  const auto add = [&](const char* one) { known += (known.empty() ? "" : ", ") + std::string(one); };
  const size_t slash = std::min(name.find('/'), name.size());
  for (const Rule& rule : rules) {
    if (rule.kind != kind || rule.algorithm || rule.device != DeviceKind::cpu) continue;
    if (name == rule.backend) return {rule.backend, nullptr};
    if (name.substr(0, slash) == rule.backend && rule.backend == std::string_view("2d"))
      if (const Algorithm* algorithm = find_algorithm(kind, name.substr(std::min(slash + 1, name.size()))))
        if (!algorithm->adasum) return {rule.backend, algorithm};
    add(rule.backend);
  }
  constexpr std::string_view kPrefix = "links/";
  const std::string_view bare = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
  if (const Algorithm* algorithm = find_algorithm(kind, bare)) return {"links", algorithm};
  for (const Algorithm& a : algorithms())
    if (a.kind == kind) add(a.name);
  refuse(entry, std::string("the choices for ") + name_of(kind) + " are " + known);
}

std::string bound_of(int64_t most, bool in_bytes) {
  if (most == 0) return "any";
  return "<= " + (in_bytes ? std::to_string(most >> 10) + " KiB" : std::to_string(most));
}

}  // namespace

std::span<const Rule> default_rules() { return kRules; }

std::vector<Rule> rules_for(const Hosts& hosts, bool allgather_by_host, std::span<const Rule> allreduces) {
  const bool shared = std::any_of(hosts.begin(), hosts.end(), [](const auto& members) { return members.size() > 1; });
  std::vector<Rule> rules;
  for (const Rule& rule : kRules) {
    const Algorithm* algorithm = rule.algorithm ? find_algorithm(rule.kind, rule.algorithm) : nullptr;
    const bool by_host = algorithm && algorithm->by_host;
    const bool is_for_these = shared && (rule.kind != Kind::allgather || allgather_by_host) &&
                              (rule.kind != Kind::reducescatter || hosts.size() <= kSummedHosts);
    if (!by_host || is_for_these) rules.push_back(rule);
    if (&rule == &kRules[0]) rules.insert(rules.end(), allreduces.begin(), allreduces.end());
  }
  return rules;
}

Selector::Selector(std::span<Backend* const> backends, int hosts, std::string_view forced,
                   std::span<const Rule> rules) {
  while (!forced.empty()) {
    const size_t comma = std::min(forced.find(','), forced.size());
    const std::string_view entry = trim(forced.substr(0, comma));
    forced.remove_prefix(std::min(comma + 1, forced.size()));
    if (entry.empty()) continue;
    const size_t equals = std::min(entry.find('='), entry.size());
    const Kind kind = parse_kind(trim(entry.substr(0, equals)), entry);
    const Choice choice = parse_choice(kind, trim(entry.substr(std::min(equals + 1, entry.size()))), entry, rules);
    if (Backend* backend = find_backend(backends, choice.backend))
      rows_.push_back({kind, 0, 0, backend, choice.algorithm, DeviceKind::cpu, true});
  }
  for (const Rule& rule : rules) {
    Backend* backend = find_backend(backends, rule.backend);
    if (!backend || hosts < rule.least_hosts) continue;
    const Algorithm* algorithm = rule.algorithm ? find_algorithm(rule.kind, rule.algorithm) : nullptr;
    rows_.push_back({rule.kind, rule.most_ranks, rule.most_bytes, backend, algorithm, rule.device});
  }
}

const Row* Selector::find(const Collective& c, const Row* after) const {
  const int64_t bytes = bytes_of(c);
  const auto fits = [&](const Row& row) {
    return row.kind == c.kind && row.device == c.device && (row.most_ranks == 0 || c.size <= row.most_ranks) &&
           (row.most_bytes == 0 || bytes <= row.most_bytes) &&
           (!row.algorithm || row.algorithm->adasum == is_adasum(c)) && row.backend->accepts(c);
  };
  const auto is_other = [&](const Row& row) {
    return !after || row.backend != after->backend || row.algorithm != after->algorithm;
  };
  for (const Row& row : std::span(rows_).subspan(after ? size_t(after - rows_.data()) : 0))
    if (is_other(row) && fits(row)) return &row;
  return nullptr;
}

const Row& Selector::choose(const Collective& c, AutotuneChoices second) const {
  const Row* const first = find(c, nullptr);
  if (!first)
    throw Error(Code::internal, std::string("no way to run ") + name_of(c.kind) + " of " + std::to_string(bytes_of(c)) +
                                    " bytes among " + std::to_string(c.size) + " ranks");
  const bool has_second = c.kind == Kind::allreduce && !is_adasum(c) && c.codec.kind == CodecKind::none &&
                          c.device == DeviceKind::cpu;
  if (!has_second || (second >> size_class(bytes_of(c)) & 1) == 0) return *first;
  const Row* const other = find(c, first);
  return other ? *other : *first;
}

int size_class(int64_t bytes) { return bytes > 0 ? std::bit_width(uint64_t(bytes)) - 1 : 0; }

std::string Selector::text() const {
  std::string text;
  char line[128];
  std::snprintf(line, sizeof line, "%-14s %-8s %-10s %s\n", "kind", "ranks", "bytes", "choice");
  text += line;
  for (const Row& row : rows_) {
    std::snprintf(line, sizeof line, "%-14s %-8s %-10s %s%s\n", name_of(row.kind),
                  bound_of(row.most_ranks, false).c_str(), bound_of(row.most_bytes, true).c_str(),
                  text_of(row).c_str(),
                  row.forced ? "  (forced)" : row.device == DeviceKind::cuda ? "  (tensors of GPUs)" : "");
    text += line;
  }
  return text;
}

std::string text_of(const Row& row) {
  const std::string backend = row.backend->name();
  return row.algorithm ? backend + "/" + row.algorithm->name : backend;
}

int64_t bytes_of(const Collective& c) {
  const int64_t element_bytes = int64_t(size_of(c.dtype));
  switch (c.kind) {
    case Kind::allreduce:
    case Kind::broadcast: return c.count * element_bytes;
    case Kind::allgather:
    case Kind::reducescatter: return std::accumulate(c.counts.begin(), c.counts.end(), int64_t(0)) * element_bytes;
    default: return 0;
  }
}

}  // namespace lightcc
