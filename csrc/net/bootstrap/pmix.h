// PMIx, by which Open MPI's mpirun serves its processes, through the library that mpirun itself uses, opened at run
// time. lightcc uses it to broadcast one note of rank 0, before or after MPI_Init: PMIx counts its users in a
// process.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lightcc {

// The libpmix that this process or one of those it descends from (mpirun, prted, orted) has mapped, the nearest first;
// "libpmix.so.2" if none has.
std::string pmix_library(pid_t from);

struct PmixNote {
  std::string version;  // of the library, "4.2.2"
  std::string note;
};

// Which process is the client of PMIx until this process exits. This process itself: with Open MPI up to 4. A child
// process of it: with Open MPI 5, whose MPI_Init fails ("local rank: Not found") where PMIx is in use already. Never
// for a while only: PMIx crashes when it is begun again, and a rank that leaves and comes back confuses the servers of
// several hosts.
enum class PmixClient { itself, child };

// Those of the job's processes that are listed must call it; the first of them brings the note. `key` must be new each
// time. Throws Error{timeout} if not all came before the deadline, Error{internal} naming the call that failed and
// what to do, as when there is no such library.
PmixNote broadcast_by_pmix(const std::string& library, PmixClient, const std::string& key,
                           const std::vector<int>& ranks, const std::optional<std::string>& mine,
                           uint64_t deadline_ns);

}  // namespace lightcc
