// What becomes of a Comm_split, once it is known what all ranks of the world have called it with. Pure, so that all
// ranks come to the same.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace lightcc::mpiabi {

// What one rank calls it with. It is sent as it is.
struct SplitCall {
  int32_t parent;       // the number of the communicator that is split
  int32_t parent_rank;  // in that
  int32_t colour;
  int32_t key;
};

// The communicators that come out of it, in one order on all ranks: each as the world's ranks of its members, which are
// its ranks 0, 1, ... Members have one parent and one colour, are ordered by key, and ranks with one key by their rank
// in the parent. Who calls it with the colour `undefined` is in none. calls: by rank of the world.
std::vector<std::vector<int>> communicators_of(std::span<const SplitCall> calls, int32_t undefined);

}  // namespace lightcc::mpiabi
