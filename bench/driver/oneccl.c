/* oneCCL through its C interface (version 2 of its API), without its headers. On CPUs it needs no device and no stream.
 *
 * Ranks find each other by an id that rank 0 makes and leaves in the file BENCH_MEETING. A call returns when
 * it is done. Its calls in groups ask for a device, so there is none that only starts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "library.h"

enum { kFloat32 = 7, kSum = 0, kWaitS = 30 };
struct unique_id {
  char data[4096];
};

static struct {
  int (*allreduce)(void*, void*, size_t, int, int, void*, void*);
  const char* (*last_error)(void*);
  int (*destroy)(void*);
  void* communicator;
} ccl;

static void checked(int code, const char* what) {
  if (code != 0) die("%s failed with code %d: %s", what, code, ccl.last_error ? ccl.last_error(ccl.communicator) : "");
}

static void ccl_allreduce(struct tensor* t) {
  checked(ccl.allreduce(t->in, t->out, (size_t)t->count, kFloat32, kSum, ccl.communicator, NULL), "onecclAllReduce");
}

static void ccl_close(void) {
  if (ccl.destroy) ccl.destroy(ccl.communicator);
}

/* The id appears under its name complete, so that nobody reads half of it. */
static struct unique_id meet(int rank, int (*make)(struct unique_id*)) {
  struct unique_id id;
  char draft[4096];
  const char* path = getenv("BENCH_MEETING");
  if (!path) die("BENCH_MEETING is not set");
  if (rank == 0) {
    checked(make(&id), "onecclGetUniqueId");
    snprintf(draft, sizeof draft, "%s.draft", path);
    FILE* file = fopen(draft, "wb");
    if (!file || fwrite(&id, sizeof id, 1, file) != 1 || fclose(file) || rename(draft, path))
      die("cannot write the id to %s", path);
    return id;
  }
  for (int tenths = 0; tenths < kWaitS * 10; ++tenths) {
    FILE* file = fopen(path, "rb");
    if (file) {
      size_t got = fread(&id, sizeof id, 1, file);
      fclose(file);
      if (got == 1) return id;
    }
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
  }
  die("rank 0 left no id in %s within %d s", path, kWaitS);
}

void open_oneccl(struct library* library, const char* path) {
  void* opened = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (!opened) die("cannot open %s: %s", path, dlerror());
  int (*version)(int*) = symbol_of(opened, "onecclGetVersion");
  int (*make)(struct unique_id*) = symbol_of(opened, "onecclGetUniqueId");
  int (*init)(void**, size_t, struct unique_id, int) = symbol_of(opened, "onecclCommInitRank");
  ccl.allreduce = symbol_of(opened, "onecclAllReduce");
  ccl.last_error = dlsym(opened, "onecclGetLastError");
  ccl.destroy = dlsym(opened, "onecclCommDestroy");
  const char *rank = getenv("PMI_RANK"), *size = getenv("PMI_SIZE");
  if (!rank || !size) die("PMI_RANK and PMI_SIZE are not set: start it with Intel MPI's mpiexec");
  library->rank = atoi(rank), library->size = atoi(size);
  struct unique_id id = meet(library->rank, make);
  checked(init(&ccl.communicator, (size_t)library->size, id, library->rank), "onecclCommInitRank");
  int code = 0;
  checked(version(&code), "onecclGetVersion");
  snprintf(library->version, sizeof library->version, "oneCCL %d.%d", code / 10000, code / 100 % 100);
  library->allreduce = ccl_allreduce, library->close = ccl_close;
}
