// What lightcc uses of NCCL, as one table of NCCL's own functions, declared here: the core needs neither its header nor
// the library, which is opened when tensors of GPUs first come. Names, values and layouts are those of NCCL's nccl.h.
// Tests fill the table with ranks that are threads (tests/unit/doubles/nccl_double.h).
#pragma once
#include <cstddef>
#include <string>

#include "base/types.h"

namespace lightcc {

// ncclResult_t, of which the core looks at these only.
inline constexpr int kNcclSuccess = 0, kNcclSystemError = 2, kNcclRemoteError = 6, kNcclInProgress = 7;

struct NcclUniqueId { char internal[128]; };

// ncclConfig_t as of 2.14; what later versions have added keeps its default.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef, version = 21400;
  int blocking = 0;  // every call returns at once, maybe with kNcclInProgress: CommGetAsyncError says when it is done
};

inline constexpr int kLeastNcclVersion = 21800;  // its communicators need not block

std::string nccl_version_text(int version);       // "2.27.3"

// A communicator is bound to the device that was current when it was made. One thread at a time may call with it.
struct NcclFunctions {
  int (*GetVersion)(int* version);
  int (*GetUniqueId)(NcclUniqueId*);
  int (*CommInitRankConfig)(void** comm, int ranks, NcclUniqueId, int rank, NcclConfig*);
  int (*CommFinalize)(void* comm);
  int (*CommDestroy)(void* comm);
  int (*CommAbort)(void* comm);
  int (*CommGetAsyncError)(void* comm, int* result);
  const char* (*GetErrorString)(int result);
  const char* (*GetLastError)(void* comm);  // of this thread, in words; also of a comm that is nullptr
  int (*GroupStart)();
  int (*GroupEnd)();
  int (*AllReduce)(const void* input, void* output, size_t count, int dtype, int op, void* comm, void* stream);
  int (*Reduce)(const void* input, void* output, size_t count, int dtype, int op, int root, void* comm, void* stream);
  int (*Broadcast)(const void* input, void* output, size_t count, int dtype, int root, void* comm, void* stream);
  int (*AllGather)(const void* input, void* output, size_t input_count, int dtype, void* comm, void* stream);
  int (*ReduceScatter)(const void* input, void* output, size_t output_count, int dtype, int op, void* comm,
                       void* stream);
  int (*Send)(const void* input, size_t count, int dtype, int peer, void* comm, void* stream);
  int (*Recv)(void* output, size_t count, int dtype, int peer, void* comm, void* stream);
};

// ncclDataType_t and ncclRedOp_t; -1: NCCL has none.
int nccl_dtype(DType);
int nccl_op(ReduceOp);

// The table. Opened at the first call, which waits for it: `library`, a path, or else what the process has loaded
// already (PyTorch's), or what the system finds as libnccl.so.2. Throws Error{invalid_argument} that says why there is
// none that can be used.
const NcclFunctions& nccl(const std::string& library);
void set_nccl(const NcclFunctions*);  // for tests: what nccl() returns from now on; nullptr: it opens the library again

}  // namespace lightcc
