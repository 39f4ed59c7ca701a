#include "collective/selector.h"

#include <cstdio>
#include <numeric>
#include <optional>

#include "base/error.h"

namespace lightcc {
namespace {

struct Default { Kind kind; int most_ranks; int64_t most_bytes; const char* algorithm; };

// Start-ups rule below, bytes above. Beyond about a thousand ranks a ring's start-ups cost more than bytes do.
constexpr int kRingRanks = 1024;
// Up to here it costs less to combine whole vectors on both ranks than to wait for halves, dot products and halves.
constexpr int64_t kAdasumWholeBytes = 64 << 10;
constexpr Default kLinks[] = {
    {Kind::allreduce, 0, 8 << 10, "recursive_doubling"},
    {Kind::allreduce, 0, 512 << 10, "halving_doubling"},
    {Kind::allreduce, kRingRanks, 0, "ring"},
    {Kind::allreduce, 0, 0, "halving_doubling"},
    {Kind::allreduce, 0, kAdasumWholeBytes, "adasum_whole"},
    {Kind::allreduce, 0, 0, "adasum_halving"},
    {Kind::reducescatter, 0, 256 << 10, "pairwise"},
    {Kind::reducescatter, 0, 0, "ring"},
    {Kind::allgather, 0, 64 << 10, "bruck"},
    {Kind::allgather, kRingRanks, 0, "ring"},
    {Kind::allgather, 0, 0, "bruck"},
    {Kind::broadcast, 0, 0, "binomial"},
    {Kind::alltoall, 0, 0, "pairwise"},
    {Kind::barrier, 0, 0, "dissemination"},
};
constexpr Kind kShared[] = {Kind::allreduce, Kind::reducescatter, Kind::allgather, Kind::broadcast,
                            Kind::alltoall};  // what that backend can do
constexpr Kind kKindsHere[] = {Kind::allreduce, Kind::reducescatter, Kind::allgather,
                               Kind::broadcast, Kind::alltoall,      Kind::barrier};

bool for_adasum(const Row& row) { return row.algorithm && row.algorithm->adasum; }
bool shared_does(Kind kind) { return std::find(std::begin(kShared), std::end(kShared), kind) != std::end(kShared); }

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

[[noreturn]] void refuse(std::string_view entry, const std::string& expected) {
  throw Error(Code::invalid_argument, "LIGHTCC_SELECT: \"" + std::string(entry) + "\" is not understood; " + expected);
}

Kind parse_kind(std::string_view name, std::string_view entry) {
  std::string known;
  for (Kind kind : kKindsHere) {
    if (name == name_of(kind)) return kind;
    known += (known.empty() ? "" : ", ") + std::string(name_of(kind));
  }
  refuse(entry, "expected <kind>=<choice>[,...] with kind one of " + known);
}

Row parse_choice(Kind kind, std::string_view name, std::string_view entry) {
  if (name == "shared" && shared_does(kind)) return {kind, 0, 0, "shared", nullptr, true};
  constexpr std::string_view kPrefix = "links/";
  const std::string_view bare = name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
  if (const Algorithm* algorithm = find_algorithm(kind, bare)) return {kind, 0, 0, "links", algorithm, true};
  std::string known = shared_does(kind) ? "shared" : "";
  for (const Algorithm& a : algorithms())
    if (a.kind == kind) known += (known.empty() ? "" : ", ") + std::string(a.name);
  refuse(entry, std::string("the choices for ") + name_of(kind) + " are " + known);
}

std::string bound_of(int64_t most, bool in_bytes) {
  if (most == 0) return "any";
  return "<= " + (in_bytes ? std::to_string(most >> 10) + " KiB" : std::to_string(most));
}

}  // namespace

Selector::Selector(bool one_host, std::string_view forced) {
  while (!forced.empty()) {
    const size_t comma = std::min(forced.find(','), forced.size());
    const std::string_view entry = trim(forced.substr(0, comma));
    forced.remove_prefix(std::min(comma + 1, forced.size()));
    if (entry.empty()) continue;
    const size_t equals = std::min(entry.find('='), entry.size());
    const Kind kind = parse_kind(trim(entry.substr(0, equals)), entry);
    const Row row = parse_choice(kind, trim(entry.substr(std::min(equals + 1, entry.size()))), entry);
    if (row.backend != "shared" || one_host) rows_.push_back(row);
  }
  if (one_host)
    for (Kind kind : kShared) rows_.push_back({kind, 0, 0, "shared", nullptr});
  for (const Default& d : kLinks)
    rows_.push_back({d.kind, d.most_ranks, d.most_bytes, "links", find_algorithm(d.kind, d.algorithm)});
}

const Row& Selector::choose(const Collective& c, std::string_view backend) const {
  const int64_t bytes = bytes_of(c);
  for (const Row& row : rows_)
    if (row.kind == c.kind && for_adasum(row) == is_adasum(c) && (backend.empty() || row.backend == backend) &&
        (row.most_ranks == 0 || c.size <= row.most_ranks) && (row.most_bytes == 0 || bytes <= row.most_bytes))
      return row;
  throw Error(Code::internal, std::string("no way to run ") + name_of(c.kind) + " of " + std::to_string(bytes) +
                                  " bytes among " + std::to_string(c.size) + " ranks" +
                                  (backend.empty() ? "" : " on backend " + std::string(backend)));
}

std::string Selector::text() const {
  std::string text;
  char line[128];
  std::snprintf(line, sizeof line, "%-14s %-8s %-10s %s\n", "kind", "ranks", "bytes", "choice");
  text += line;
  for (const Row& row : rows_) {
    std::snprintf(line, sizeof line, "%-14s %-8s %-10s %s%s\n", name_of(row.kind),
                  bound_of(row.most_ranks, false).c_str(), bound_of(row.most_bytes, true).c_str(),
                  text_of(row).c_str(), row.forced ? "  (forced)" : "");
    text += line;
  }
  return text;
}

std::string text_of(const Row& row) {
  return row.algorithm ? row.backend + "/" + row.algorithm->name : row.backend;
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
