// A communicator: some ranks of the world in an order of their own, over a group of lightcc, whose members are in the
// world's order.
#pragma once
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "api/lightcc.h"

namespace lightcc::mpiabi {

struct Communicator {
  // ranks: of the world, in the communicator's order. own: this process's rank of the world, which is one of them.
  // number: the same on all members, and no other communicator's. group: of these ranks; none for one rank alone.
  Communicator(int number, std::vector<int> ranks, int own, int group);

  int size() const { return int(ranks.size()); }
  // A name for the next operation, which all members give it alike: "jax.2.7 of ranks 0, 1".
  std::string next_name();
  // For a message, of which ranks have unequal numbers: "jax.2.m7 of ranks 0, 1".
  std::string next_message_name();

  const int number;
  const std::vector<int> ranks;
  const int rank;                      // this process's, in the communicator
  const int group;
  const std::vector<int> ordered;      // by rank of the group: the communicator's rank
  const bool is_ordered;               // they are the same
  int place_in_group(int of_rank) const { return int(std::ranges::find(ordered, of_rank) - ordered.begin()); }

 private:
  std::atomic<uint64_t> operations_{0}, messages_{0};
  const std::string title_;            // " of ranks 0, 1"
};

// Runs a request to its end. It has a name and no callback `done`. Throws Error.
void run(lightcc_request request);
// The same in two parts. begin returns a handle, which is to be finished.
int64_t begin(const lightcc_request& request);
void finish(int64_t handle);
// How many have begun in this process, and how many are under way.
struct Activity {
  uint64_t begun;
  int under_way;
};
Activity activity();

// Request of this kind with one tensor, whose `shape` it points at.
lightcc_request request_of(int kind, const std::string& name, const Communicator&, const lightcc_tensor&);

}  // namespace lightcc::mpiabi
