// Which backend and algorithm runs a collective: a printable table, first row that fits. Pure: it looks at what
// all members of the group know alike, so all choose alike.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "collective/algorithms.h"

namespace lightcc {

struct Row {
  Kind kind;
  int most_ranks;             // 0: any
  int64_t most_bytes;         // 0: any; the bytes of the whole result, see bytes_of()
  std::string backend;
  const Algorithm* algorithm; // nullptr: the backend has only one way
  bool forced = false;
};
std::string text_of(const Row&);  // "links/ring", "shared"

class Selector {
 public:
  // one_host: all ranks of the group share a host. forced: "allreduce=ring,reducescatter=shared", the choices that
  // go before all others (LIGHTCC_SELECT); "shared" holds only for groups on one host. An unknown kind or choice
  // throws Error{invalid_argument} that lists the known ones.
  Selector(bool one_host, std::string_view forced);

  // The first row that fits; with a backend, the first of its rows. Throws Error{internal} if none does.
  const Row& choose(const Collective&, std::string_view backend = {}) const;
  std::string text() const;

 private:
  std::vector<Row> rows_;
};

// What a row's most_bytes is held against: the bytes of the vector that is reduced, gathered or broadcast.
// 0 for alltoall, where each rank knows only its own part.
int64_t bytes_of(const Collective&);

}  // namespace lightcc
