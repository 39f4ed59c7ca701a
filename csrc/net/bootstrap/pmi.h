// PMI-1, the lines of text that an MPI process and the proxy of its mpiexec exchange over an inherited socket (PMI_FD):
// MPICH, Intel MPI, Slurm's pmi2 plugin. lightcc uses it to broadcast one note of rank 0, before or after MPI_Init:
// MPI itself speaks on that socket only inside its calls for start, end, spawn and ports.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace lightcc {

struct PmiNote {
  std::string kvs_name;  // of the job's key-value space: the same on all ranks of a job, different between jobs
  std::string note;
};

// All processes that mpiexec started must call it, and in the same order; one of them brings the note: at most
// 64 KiB without white space. `key` must be new each time. Throws Error{timeout} if not all came before the deadline,
// Error{internal} naming what the server answered.
PmiNote broadcast_by_pmi(int fd, const std::string& key, const std::optional<std::string>& mine, uint64_t deadline_ns);

// Says "finalize" when this process exits, if MPI has not done so by then: else mpiexec would take the exit of a
// process that has spoken with it for a crash, and kill the others. The first descriptor that is given counts.
void finalize_pmi_at_exit(int fd);

}  // namespace lightcc
