/* Not a library but what the memory of this machine allows: an all-reduce in which every input is read once and every
 * output written once, straight from memory that all ranks map, with plain loops for the compiler to vectorise; and the
 * round trip of a cache line on which the other side spins. Nothing is checked, negotiated or named here, so a library
 * may come near it and, for data beyond the caches, may pass it only with better stores than the compiler's. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "library.h"

enum { kLine = 64, kMostRanks = 64, kHeader = 2 << 20, kCollapse = 25 /* MADV_COLLAPSE */ };

static struct {
  struct line {
    _Atomic uint64_t sequence;
    char pad[kLine - sizeof(uint64_t)];
  }* lines; /* one each rank, then two for the round trip */
  char* memory;
  int64_t region;         /* bytes a rank has */
  int64_t used;           /* the ranks allocate alike, so an offset in one region is the same tensor in the others */
  int rank, size, yields; /* yields: ranks share cores, so spinning would keep the other from its turn */
  uint64_t turn, trips;
} shared;

static void wait_until(_Atomic uint64_t* sequence, uint64_t value) {
  while (atomic_load_explicit(sequence, memory_order_acquire) < value) {
    if (shared.yields) sched_yield();
#ifdef __x86_64__
    else
      __builtin_ia32_pause();
#endif
  }
}

static void meet(void) {
  atomic_store_explicit(&shared.lines[shared.rank].sequence, ++shared.turn, memory_order_release);
  for (int r = 0; r < shared.size; ++r) wait_until(&shared.lines[r].sequence, shared.turn);
}

static float* of_rank(const float* mine, int rank) {
  return (float*)((char*)mine + (rank - shared.rank) * shared.region);
}

static void sum_of_two(const float* a, const float* b, float* x, float* y, int64_t from, int64_t to) {
#pragma GCC ivdep
  for (int64_t i = from; i < to; ++i) {
    float sum = a[i] + b[i];
    x[i] = sum, y[i] = sum;
  }
}

static void sum_of_four(float* const in[4], float* const out[4], int64_t from, int64_t to) {
  const float *a = in[0], *b = in[1], *c = in[2], *d = in[3];
  float *w = out[0], *x = out[1], *y = out[2], *z = out[3];
#pragma GCC ivdep
  for (int64_t i = from; i < to; ++i) {
    float sum = (a[i] + b[i]) + (c[i] + d[i]);
    w[i] = sum, x[i] = sum, y[i] = sum, z[i] = sum;
  }
}

static void floor_allreduce(struct tensor* t) {
  float *in[4], *out[4];
  for (int r = 0; r < shared.size; ++r) in[r] = of_rank(t->in, r), out[r] = of_rank(t->out, r);
  int64_t share = (t->count / shared.size + 15) & ~(int64_t)15; /* whole cache lines */
  int64_t from = share * shared.rank, to = shared.rank == shared.size - 1 ? t->count : from + share;
  if (from > t->count) from = t->count;
  if (to > t->count) to = t->count;
  meet(); /* the inputs are there */
  if (shared.size == 2)
    sum_of_two(in[0], in[1], out[0], out[1], from, to);
  else
    sum_of_four(in, out, from, to);
  meet(); /* the outputs are there */
}

void round_trip(void) {
  _Atomic uint64_t *there = &shared.lines[kMostRanks].sequence, *back = &shared.lines[kMostRanks + 1].sequence;
  ++shared.trips;
  if (shared.rank == 0) {
    atomic_store_explicit(there, shared.trips, memory_order_release);
    wait_until(back, shared.trips);
  } else if (shared.rank == 1) {
    wait_until(there, shared.trips);
    atomic_store_explicit(back, shared.trips, memory_order_release);
  }
}

static void* floor_memory(int64_t bytes) {
  char* memory = shared.memory + shared.rank * shared.region + shared.used;
  shared.used += (bytes + kHeader - 1) & ~(int64_t)(kHeader - 1);
  if (shared.used > shared.region) die("floor: %lld bytes do not fit", (long long)bytes);
  memset(memory, 0, (size_t)bytes);
  madvise(memory, (size_t)bytes, kCollapse); /* huge pages where the kernel gives them, as lightcc asks for too */
  return memory;
}

static void floor_release(void* memory) { (void)memory, shared.used = 0; }
static void floor_close(void) {}

static int number(const char* name) {
  const char* text = getenv(name);
  if (!text) die("floor: %s is not set", name);
  return atoi(text);
}

void open_floor(struct library* library) {
  shared.rank = library->rank = number("HOROVOD_RANK"), shared.size = library->size = number("HOROVOD_SIZE");
  shared.yields = number("BENCH_YIELD"), shared.region = (int64_t)number("BENCH_FLOOR_MIB") << 20;
  if (shared.size != 2 && shared.size != 4) die("floor: for 2 or 4 ranks, not %d", shared.size);
  size_t bytes = (size_t)(kHeader + shared.region * shared.size);
  /* On a border of 2 MiB, so that huge pages fit. */
  uintptr_t room =
      (uintptr_t)mmap(NULL, bytes + kHeader, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* base = (char*)((room + kHeader - 1) & ~(uintptr_t)(kHeader - 1));
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, number("BENCH_FLOOR_FD"), 0) != base)
    die("floor: cannot map %zu bytes", bytes);
  shared.lines = (void*)base, shared.memory = base + kHeader;
  strcpy(library->version, "plain loops over shared memory");
  library->allreduce = floor_allreduce, library->allocate = floor_memory, library->release = floor_release;
  library->close = floor_close;
}
