// The world of a job, as a rank learns it from the variables that launchers set: plain data.
#pragma once
#include <string>
#include <vector>

#include "base/config.h"

namespace lightcc {

struct World {
  int rank = 0, size = 1;
  // Among the ranks of this host. A local_size of 0: the launcher does not say.
  int local_rank = 0, local_size = 1;
  int slot = -1;  // an elastic job's worker keeps this local rank in all its worlds; -1: it follows from the ranks
  int cross_rank = 0, cross_size = 1;  // this host among the hosts
  std::string job;              // the same on all ranks of a job, different between jobs
  bool job_of_host = false;     // the launcher gives no such id: it is the same on the ranks of one host only
  std::string launcher = "none";  // who said so, for messages
  std::string host;
  std::vector<int> members;  // by rank: which rank of the launcher it is; empty: the same

  bool one_host() const { return local_size == size; }  // the launcher said so
  int launched_rank(int rank) const { return members.empty() ? rank : members[size_t(rank)]; }
};

// First that fits: lightccrun, torchrun, Open MPI, PMI (MPICH, Intel MPI), Slurm, HOROVOD_RANK, MASTER_ADDR; nothing
// set: a world of one. torchrun, Open MPI and PMI inside a rank of lightccrun come before it. Throws
// Error{invalid_argument} naming the variables that contradict each other, or those that are missing where others say
// that there are several ranks.
World find_world(const Environment&);

// Whether its launcher was started inside a rank of lightccrun, whose other variables are then another job's.
bool is_nested(const Environment&);
// What rank 0 tells the user about that, if that rank is one of several, in the first of these; else empty.
std::string nesting_remark(const Environment&);

// A world of some ranks of this one, numbered as listed. Worlds of different lists are different jobs. Throws
// Error{invalid_argument} if this rank is not in the list, or the list is none.
World subset(const World&, const std::vector<int>& ranks);

}  // namespace lightcc
