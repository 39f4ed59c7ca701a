/* One rank of one library, driven line by line over a socket, so that no hot loop runs in Python.
 *
 *     driver SOCKET BARRIER CORES KIND [LIBRARY]
 *
 * SOCKET   the parent's AF_UNIX socket. The rank says "hello RANK SIZE VERSION", then answers each command with one
 *          line that begins with "ok" or "error". Between commands it sleeps in read().
 * BARRIER  a file of two pages that the ranks of this library map to start together: it is the driver's own, so that no
 *          library's barrier takes part in what is measured.
 * CORES    "any", or cores separated by commas: rank r is bound to the r-th, beginning anew when they are used up.
 * KIND     lightcc, mpich (the binary interface of MPICH and Intel MPI), openmpi, oneccl, floor.
 *
 * Commands:
 *   prepare MEMORY PLACE COUNT...    tensors of COUNT floats
 *   check HOW SEED                   all-reduces numbers that differ by rank and seed; compares every float
 *   time HOW WARM CALLS BATCHES LIMIT_MS
 *                                    the nanoseconds that each batch of CALLS calls took, after WARM calls; fewer
 *                                    batches, but one at least, when the time is up
 *   release                          of what was prepared
 *   quit
 * MEMORY: private (malloc, each tensor its own) or shared (one piece of the library's own, tensors in a row).
 * PLACE: in (place) or out.
 * HOW: each (blocking, one after the other), async (start all, then wait for all), fused (copied into one buffer and
 * back); of the floor also copy (memcpy on every rank, nothing sent) and line (round trip of a cache line). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "library.h"

enum { kMostTensors = 1024, kMostBatches = 64, kTensorAlign = 64, kMostRanks = 64, kLineBytes = 1 << 16 };

static struct library library;
static FILE *commands, *parent; /* two streams of one socket: one alone may not turn from reading to writing */

static struct {
  struct tensor tensors[kMostTensors], fused;
  int count, shared;
  void* memory; /* shared memory's one piece */
} prepared;

static struct {
  struct {
    _Atomic uint64_t turn;
    char pad[56];
  } arrived[kMostRanks];
  _Atomic uint64_t decision, last_batch; /* see time_is_up(); a last batch of 0 is none */
}* page;

void die(const char* format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "driver, rank %d: %s\n", library.rank, text);
  if (parent) fprintf(parent, "error rank %d: %s\n", library.rank, text), fflush(parent);
  _exit(1);
}

void* symbol_of(void* handle, const char* name) {
  void* found = dlsym(handle, name);
  if (!found) die("the library has no %s", name);
  return found;
}

static void answer(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vfprintf(parent, format, arguments);
  va_end(arguments);
  fputc('\n', parent);
  fflush(parent);
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Yields at once: ranks may share one core here, and what it costs is not measured. */
static void start_together(void) {
  static uint64_t turn;
  const uint64_t deadline = now_ns() + 60000000000u;
  atomic_store(&page->arrived[library.rank].turn, ++turn);
  for (int r = 0; r < library.size; ++r)
    while (atomic_load(&page->arrived[r].turn) < turn) {
      sched_yield();
      if (now_ns() > deadline) die("rank %d did not come to the start of a measurement for 60 s", r);
    }
}

/* Whole numbers of at most 10 bits, so that every sum is exact in whichever order it is made. */
static float value_of(uint32_t rank, uint32_t seed, uint32_t i) {
  uint32_t x = (i + 0x9e3779b9u * (rank + 1) + 0x85ebca6bu * seed) * 0xc2b2ae35u;
  x ^= x >> 15, x *= 0x27d4eb2fu, x ^= x >> 13;
  return (float)(int32_t)(x & 1023u) - 511.0f;
}

static void run(const char* how) {
  struct tensor* tensors = prepared.tensors;
  switch (how[0]) {
    case 'e':
      for (int i = 0; i < prepared.count; ++i) library.allreduce(&tensors[i]);
      break;
    case 'a':
      if (!library.start) die("this library has no call that only starts");
      library.start(tensors, prepared.count);
      library.finish(tensors, prepared.count);
      break;
    case 'f': {
      float* at = prepared.fused.in;
      for (int i = 0; i < prepared.count; at += tensors[i++].count)
        memcpy(at, tensors[i].in, (size_t)tensors[i].count * sizeof(float));
      library.allreduce(&prepared.fused);
      at = prepared.fused.out;
      for (int i = 0; i < prepared.count; at += tensors[i++].count)
        memcpy(tensors[i].out, at, (size_t)tensors[i].count * sizeof(float));
      break;
    }
    case 'c':
      memcpy(tensors[0].out, tensors[0].in, (size_t)tensors[0].count * sizeof(float));
      break;
    case 'l':
      round_trip();
      break;
    default:
      die("unknown way to run: %s", how);
  }
}

static float* private_memory(int64_t count) {
  void* memory = NULL;
  if (posix_memalign(&memory, kTensorAlign, (size_t)count * sizeof(float)))
    die("no memory for %lld floats", (long long)count);
  memset(memory, 0, (size_t)count * sizeof(float));
  return memory;
}

static void release(void) {
  if (prepared.count == 0) return;
  if (library.forget) library.forget(prepared.tensors, prepared.count);
  for (int i = 0; i < prepared.count && !prepared.shared; ++i) {
    if (prepared.tensors[i].in != prepared.tensors[i].out) free(prepared.tensors[i].in);
    free(prepared.tensors[i].out);
  }
  if (prepared.shared) library.release(prepared.memory);
  free(prepared.fused.in);
  memset(&prepared, 0, sizeof prepared);
}

static void prepare(char* words) {
  release();
  const char *memory = strtok(words, " "), *place = strtok(NULL, " ");
  if (!memory || !place) die("prepare: needs MEMORY PLACE COUNT...");
  int64_t bytes = 0, total = 0;
  for (char* word; (word = strtok(NULL, " ")) != NULL;) {
    if (prepared.count == kMostTensors) die("prepare: more than %d tensors", kMostTensors);
    struct tensor* t = &prepared.tensors[prepared.count];
    t->index = prepared.count++, t->count = atoll(word);
    snprintf(t->name, sizeof t->name, "bench.%d.%lld", t->index, (long long)t->count);
    bytes += (t->count * (int64_t)sizeof(float) + kTensorAlign - 1) / kTensorAlign * kTensorAlign, total += t->count;
  }
  prepared.shared = memory[0] == 's';
  const int copies = place[0] == 'i' ? 1 : 2;
  if (prepared.shared) {
    if (!library.allocate) die("prepare: this library has no memory of its own");
    prepared.memory = library.allocate(bytes * copies);
    memset(prepared.memory, 0, (size_t)(bytes * copies));
  }
  int64_t at = 0;
  for (int i = 0; i < prepared.count; ++i) {
    struct tensor* t = &prepared.tensors[i];
    t->in = prepared.shared ? (float*)((char*)prepared.memory + at) : private_memory(t->count);
    if (copies == 1)
      t->out = t->in;
    else
      t->out = prepared.shared ? (float*)((char*)t->in + bytes) : private_memory(t->count);
    at += (t->count * (int64_t)sizeof(float) + kTensorAlign - 1) / kTensorAlign * kTensorAlign;
  }
  if (prepared.count > 1) { /* one tensor alone has nothing to be fused with */
    prepared.fused.in = prepared.fused.out = private_memory(total);
    prepared.fused.count = total, prepared.fused.index = prepared.count;
    snprintf(prepared.fused.name, sizeof prepared.fused.name, "bench.fused.%lld", (long long)total);
  }
  answer("ok");
}

static void check(const char* how, uint32_t seed) {
  for (int i = 0; i < prepared.count; ++i)
    for (int64_t k = 0; k < prepared.tensors[i].count; ++k)
      prepared.tensors[i].in[k] = value_of((uint32_t)library.rank, seed + (uint32_t)i, (uint32_t)k);
  start_together();
  run(how);
  for (int i = 0; i < prepared.count; ++i) {
    const struct tensor* t = &prepared.tensors[i];
    for (int64_t k = 0; k < t->count; ++k) {
      float expected = 0, mine = value_of((uint32_t)library.rank, seed + (uint32_t)i, (uint32_t)k);
      for (int r = 0; r < library.size; ++r) expected += value_of((uint32_t)r, seed + (uint32_t)i, (uint32_t)k);
      if (t->out[k] != expected)
        die("WRONG RESULT: tensor %d of %lld floats, float %lld is %g and should be %g (seed %u)", i,
            (long long)t->count, (long long)k, t->out[k], expected, seed);
      if (t->in != t->out && t->in[k] != mine)
        die("WRONG RESULT: tensor %d of %lld floats: its input was changed at %lld", i, (long long)t->count,
            (long long)k);
    }
  }
  /* Zeros stay zeros however often they are summed in place; infinities or denormals would be measured otherwise. */
  for (int i = 0; i < prepared.count; ++i) {
    memset(prepared.tensors[i].in, 0, (size_t)prepared.tensors[i].count * sizeof(float));
    memset(prepared.tensors[i].out, 0, (size_t)prepared.tensors[i].count * sizeof(float));
  }
  start_together(); /* no rank begins anew while another still compares */
  answer("ok");
}

/* At the end of a batch all ranks learn from rank 0 whether time is up. A rank that is still at an earlier batch does
 * not take a later end for its own. */
static int time_is_up(uint64_t measurement, uint64_t batch, uint64_t deadline) {
  if (library.rank == 0) {
    if (now_ns() > deadline) atomic_store(&page->last_batch, batch);
    atomic_store(&page->decision, measurement * 1000 + batch);
  }
  while (atomic_load(&page->decision) < measurement * 1000 + batch) sched_yield();
  return atomic_load(&page->last_batch) == batch;
}

static void measure(const char* how, int warm, int calls, int batches, int limit_ms) {
  static uint64_t measurement;
  uint64_t took[kMostBatches], deadline = now_ns() + (uint64_t)limit_ms * 1000000u;
  int done = 0;
  if (batches < 1 || batches > kMostBatches) die("time: 1 to %d batches, not %d", kMostBatches, batches);
  ++measurement;
  if (library.rank == 0) atomic_store(&page->last_batch, 0);
  start_together();
  for (int i = 0; i < warm; ++i) run(how);
  do {
    uint64_t begin = now_ns();
    for (int i = 0; i < calls; ++i) run(how);
    took[done++] = now_ns() - begin;
  } while (done < batches && !time_is_up(measurement, (uint64_t)done, deadline));
  fprintf(parent, "ok");
  for (int b = 0; b < done; ++b) fprintf(parent, " %llu", (unsigned long long)took[b]);
  answer("");
}

static void serve(void) {
  static char line[kLineBytes];
  char how[16];
  unsigned seed;
  int warm, calls, batches, limit_ms;
  while (fgets(line, sizeof line, commands)) {
    line[strcspn(line, "\n")] = 0;
    if (strncmp(line, "prepare ", 8) == 0)
      prepare(line + 8);
    else if (sscanf(line, "check %15s %u", how, &seed) == 2)
      check(how, seed);
    else if (sscanf(line, "time %15s %d %d %d %d", how, &warm, &calls, &batches, &limit_ms) == 5)
      measure(how, warm, calls, batches, limit_ms);
    else if (strcmp(line, "release") == 0)
      release(), answer("ok");
    else if (strcmp(line, "quit") == 0)
      break;
    else
      die("unknown command: %.80s", line);
  }
}

/* Before the library is opened: it looks at the cores it may use, and its threads inherit them. */
static void bind_to(const char* cores) {
  const char* names[] = {"HOROVOD_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"};
  int rank = -1, list[kMostRanks], count = 0;
  if (strcmp(cores, "any") == 0) return;
  for (size_t i = 0; i < sizeof names / sizeof *names && rank < 0; ++i)
    if (getenv(names[i])) rank = atoi(getenv(names[i]));
  if (rank < 0) die("cannot tell which rank this is, to bind it");
  for (const char* at = cores; *at && count < kMostRanks; at += strspn(at, ","))
    list[count++] = (int)strtol(at, (char**)&at, 10);
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(list[rank % count], &set);
  if (sched_setaffinity(0, sizeof set, &set)) die("cannot bind rank %d to core %d", rank, list[rank % count]);
}

int main(int argc, char** argv) {
  if (argc < 5) die("usage: driver SOCKET BARRIER CORES KIND [LIBRARY]");
  const char *kind = argv[4], *path = argc > 5 ? argv[5] : "";
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof address)) die("cannot connect to %s", argv[1]);
  commands = fdopen(fd, "r"), parent = fdopen(dup(fd), "w");
  if (!commands || !parent) die("cannot use the socket");
  int file = open(argv[2], O_RDWR | O_CLOEXEC);
  page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || page == MAP_FAILED) die("cannot map %s", argv[2]);
  bind_to(argv[3]);
  if (strcmp(kind, "lightcc") == 0)
    open_lightcc(&library, path);
  else if (strcmp(kind, "mpich") == 0)
    open_mpi_library(&library, path, 0);
  else if (strcmp(kind, "openmpi") == 0)
    open_mpi_library(&library, path, 1);
  else if (strcmp(kind, "oneccl") == 0)
    open_oneccl(&library, path);
  else if (strcmp(kind, "floor") == 0)
    open_floor(&library);
  else
    die("unknown kind of library: %s", kind);
  answer("hello %d %d %s", library.rank, library.size, library.version);
  serve();
  alarm(20); /* a library whose end hangs must not keep the benchmark's own end waiting */
  release();
  library.close();
  return 0;
}
