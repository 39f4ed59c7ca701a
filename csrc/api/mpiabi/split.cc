#include "api/mpiabi/split.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace lightcc::mpiabi {

std::vector<std::vector<int>> communicators_of(std::span<const SplitCall> calls, int32_t undefined) {
  std::map<std::pair<int32_t, int32_t>, std::vector<int>> members;  // by parent and colour
  for (int rank = 0; rank < int(calls.size()); ++rank)
    if (const SplitCall& call = calls[size_t(rank)]; call.colour != undefined)
      members[{call.parent, call.colour}].push_back(rank);
  std::vector<std::vector<int>> found;
  for (auto& [which, ranks] : members) {
    std::ranges::sort(ranks, {}, [&](int rank) {
      const SplitCall& call = calls[size_t(rank)];
      return std::tuple(call.key, call.parent_rank, rank);
    });
    found.push_back(std::move(ranks));
  }
  return found;
}

}  // namespace lightcc::mpiabi
