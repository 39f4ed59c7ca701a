/* MPI without its headers: the two binary interfaces in use, MPICH's (MPICH, Intel MPI, MVAPICH) and Open MPI's.
 *
 * They differ in what a handle is (an int with a documented value, or the address of an object in the library) and in
 * a few constants. In both a handle travels in one register of the calling convention of x86-64 and aarch64, so one
 * set of prototypes with pointer-sized handles serves both. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "library.h"

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "handles are passed as pointers to functions that take an int: look at the calling convention first"
#endif

typedef void* handle; /* MPI_Comm, MPI_Datatype, MPI_Op */

static struct {
  int (*allreduce)(const void*, void*, int, handle, handle, handle);
  int (*iallreduce)(const void*, void*, int, handle, handle, handle, void*);
  int (*waitall)(int, void*, void*);
  int (*finalize)(void);
  handle world, type_float, sum;
  void *in_place, *statuses_ignore;
  size_t request_bytes;
  void* requests;
  int requests_room;
} mpi;

static void checked(int code, const char* what) {
  if (code != 0) die("%s failed with code %d", what, code);
}

static const void* input_of(const struct tensor* t) { return t->in == t->out ? mpi.in_place : t->in; }

static void mpi_allreduce(struct tensor* t) {
  checked(mpi.allreduce(input_of(t), t->out, (int)t->count, mpi.type_float, mpi.sum, mpi.world), "MPI_Allreduce");
}

static void mpi_start(struct tensor* tensors, int count) {
  if (count > mpi.requests_room) {
    mpi.requests = realloc(mpi.requests, mpi.request_bytes * (size_t)count);
    mpi.requests_room = count;
  }
  for (int i = 0; i < count; ++i)
    checked(mpi.iallreduce(input_of(&tensors[i]), tensors[i].out, (int)tensors[i].count, mpi.type_float, mpi.sum,
                           mpi.world, (char*)mpi.requests + mpi.request_bytes * (size_t)i),
            "MPI_Iallreduce");
}

static void mpi_finish(struct tensor* tensors, int count) {
  (void)tensors;
  checked(mpi.waitall(count, mpi.requests, mpi.statuses_ignore), "MPI_Waitall");
}

static void mpi_close(void) { mpi.finalize(); }

void open_mpi_library(struct library* library, const char* path, int openmpi_abi) {
  void* opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!opened) die("cannot open %s: %s", path, dlerror());
  int (*init)(void*, void*) = symbol_of(opened, "MPI_Init");
  int (*comm_rank)(handle, int*) = symbol_of(opened, "MPI_Comm_rank");
  int (*comm_size)(handle, int*) = symbol_of(opened, "MPI_Comm_size");
  int (*version)(char*, int*) = symbol_of(opened, "MPI_Get_library_version");
  mpi.allreduce = symbol_of(opened, "MPI_Allreduce");
  mpi.iallreduce = symbol_of(opened, "MPI_Iallreduce");
  mpi.waitall = symbol_of(opened, "MPI_Waitall");
  mpi.finalize = symbol_of(opened, "MPI_Finalize");
  if (openmpi_abi) {
    mpi.world = symbol_of(opened, "ompi_mpi_comm_world");
    mpi.type_float = symbol_of(opened, "ompi_mpi_float");
    mpi.sum = symbol_of(opened, "ompi_mpi_op_sum");
    mpi.in_place = (void*)1, mpi.statuses_ignore = NULL, mpi.request_bytes = sizeof(void*);
  } else {
    mpi.world = (handle)(intptr_t)0x44000000, mpi.type_float = (handle)(intptr_t)0x4c00040a;
    mpi.sum = (handle)(intptr_t)0x58000003;
    mpi.in_place = (void*)(intptr_t)-1, mpi.statuses_ignore = (void*)1, mpi.request_bytes = sizeof(int);
  }
  checked(init(NULL, NULL), "MPI_Init");
  checked(comm_rank(mpi.world, &library->rank), "MPI_Comm_rank");
  checked(comm_size(mpi.world, &library->size), "MPI_Comm_size");
  static char text[8192]; /* MPI_MAX_LIBRARY_VERSION_STRING is at most this */
  int length = 0;
  checked(version(text, &length), "MPI_Get_library_version");
  text[strcspn(text, "\n")] = 0;
  snprintf(library->version, sizeof library->version, "%.1000s", text);
  library->allreduce = mpi_allreduce, library->start = mpi_start, library->finish = mpi_finish;
  library->close = mpi_close;
}
