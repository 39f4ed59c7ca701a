// Which backend and algorithm runs a collective: a printable table, first row that fits. Pure: it looks at what
// all members of the group know alike, so all choose alike.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collective/algorithms.h"

namespace lightcc {

// A row as it is written down. A bound of 0 is none.
struct Rule {
  Kind kind;
  int least_hosts;            // of the group
  int most_ranks;
  int64_t most_bytes;         // of the whole result, see bytes_of()
  const char* backend;        // its name()
  const char* algorithm;      // nullptr: the backend has only one way
  DeviceKind device = DeviceKind::cpu;
};
std::span<const Rule> default_rules();
// Those for members on such hosts: where each has one, nothing is gained by host. allgather_by_host: false leaves
// all-gathers flat. allreduces: go before all others of their kind but the compressed ones (cost_model_rules.h).
std::vector<Rule> rules_for(const Hosts&, bool allgather_by_host, std::span<const Rule> allreduces = {});

struct Row {                  // a rule whose backend is there
  Kind kind;
  int most_ranks;
  int64_t most_bytes;
  Backend* backend;
  const Algorithm* algorithm;
  DeviceKind device = DeviceKind::cpu;
  bool forced = false;
};
std::string text_of(const Row&);  // "links/ring", "2d/pairwise", "shared"

// Sizes of all-reduces, by bits, for which the second row that fits is taken: bit k is for 2^k to 2^(k+1) - 1 bytes.
using AutotuneChoices = uint64_t;
int size_class(int64_t bytes);  // k; 0 for no bytes

class Selector {
 public:
  Selector() = default;       // no rows
  // backends: those that the group has; they must outlive this. Rules for others are left out. hosts: of the group.
  // forced: "allreduce=ring,reducescatter=shared", the choices that go before all others (LIGHTCC_SELECT); they hold
  // where the group has that backend. An unknown kind or choice throws Error{invalid_argument} that lists the known
  // ones.
  Selector(std::span<Backend* const> backends, int hosts, std::string_view forced,
           std::span<const Rule> rules = default_rules());

  // The first row that fits and whose backend accepts it. Throws Error{internal} if there is none. second: the next
  // other one, if there is; for all-reduces of the CPU that are neither compressed nor Adasum.
  const Row& choose(const Collective&, AutotuneChoices second = 0) const;
  bool has(const Collective& c) const { return find(c, nullptr) != nullptr; }  // is there one?
  std::string text() const;

 private:
  // The first of those behind `after`, if that is not nullptr, which do something else than that.
  const Row* find(const Collective&, const Row* after) const;

  std::vector<Row> rows_;
};

// What a row's most_bytes is held against: the bytes of the vector that is reduced, gathered or broadcast.
// 0 for alltoall, where each rank knows only its own part.
int64_t bytes_of(const Collective&);

}  // namespace lightcc
