// Who takes part: plain data, read from the variables that launchers set.
#pragma once
#include <string>

#include "base/config.h"

namespace lightcc {

struct World {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host
  int cross_rank = 0, cross_size = 1;  // this host among the hosts
  std::string job;                     // the same on all ranks of a job, different between jobs
  std::string launcher = "none";       // who said so, for messages
  std::string host;
};

// First that fits: lightccrun, torchrun, Open MPI, PMI (MPICH, Intel MPI); nothing set: a world of one.
// Throws Error{invalid_argument} naming the variables that contradict each other.
World find_world(const Environment&);

}  // namespace lightcc
