// A communicator: some ranks of the world in an order of their own, over a group of lightcc, whose members are in the
// world's order.
#pragma once
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

  const int number;
  const std::vector<int> ranks;
  const int rank;                      // this process's, in the communicator
  const int group;
  const std::vector<int> ordered;      // by rank of the group: the communicator's rank
  const bool is_ordered;               // they are the same

 private:
  std::atomic<uint64_t> operations_{0};
  const std::string title_;            // " of ranks 0, 1"
};

// Runs a request to its end. It has a name and no callback `done`. Throws Error.
void run(lightcc_request request);
// How many have begun in this process, and how many are under way.
struct Activity {
  uint64_t begun;
  int under_way;
};
Activity activity();

// Request of this kind with one tensor, whose `shape` it points at.
lightcc_request request_of(int kind, const std::string& name, const Communicator&, const lightcc_tensor&);

}  // namespace lightcc::mpiabi
