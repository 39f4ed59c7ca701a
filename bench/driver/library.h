/* What the driver needs of a library: the few calls of an all-reduce, in one form for all of them.
 *
 * One file a library fills in this struct. Every library is opened at run time, so none of them has to be there when
 * the driver is compiled. Nothing here may fail quietly: whatever goes wrong ends in die(). */
#ifndef BENCH_LIBRARY_H
#define BENCH_LIBRARY_H
#include <stdint.h>

struct tensor {
  float *in, *out; /* the same if the sum is made in place */
  int64_t count;   /* floats */
  int index;       /* which of the tensors that are prepared together */
  char name[48];   /* differs between tensors and between counts */
  int64_t handle;  /* the library's, from start to finish */
};

struct library {
  int rank, size;
  char version[1024];
  void (*allreduce)(struct tensor* tensor);          /* blocking */
  void (*start)(struct tensor* tensors, int count);  /* all of them, in order; NULL: it has no such call */
  void (*finish)(struct tensor* tensors, int count); /* all that start() was given */
  void* (*allocate)(int64_t bytes);                  /* memory that ranks share; NULL: the library has no such thing */
  void (*release)(void* memory);
  void (*forget)(struct tensor* tensors, int count); /* before memory goes away; NULL: nothing to forget */
  void (*close)(void);
};

void open_mpi_library(struct library* library, const char* path, int openmpi_abi);
void open_lightcc(struct library* library, const char* path);
void open_oneccl(struct library* library, const char* path);
void open_floor(struct library* library);

void round_trip(void); /* floor.c: one there and back of a cache line between ranks 0 and 1 */

void* symbol_of(void* handle, const char* name);
void die(const char* format, ...) __attribute__((noreturn, format(printf, 1, 2)));

#endif
