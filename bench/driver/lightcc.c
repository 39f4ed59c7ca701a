/* lightcc through its C API, as the Python package uses it: lightcc_submit with LIGHTCC_BLOCK for a call that waits;
 * for those that travel while the caller goes on requests prepared once and started by number, all in one call, which
 * are a set as an optimizer's gradients are. */
#include "../../csrc/api/lightcc.h"

#include <dlfcn.h>
#include <string.h>

#include "library.h"

static struct {
  __typeof__(&lightcc_submit) submit;
  __typeof__(&lightcc_prepare) prepare;
  __typeof__(&lightcc_start_all) start_all;
  __typeof__(&lightcc_discard) discard;
  __typeof__(&lightcc_finish) finish;
  __typeof__(&lightcc_finish_all) finish_all;
  __typeof__(&lightcc_alloc) alloc;
  __typeof__(&lightcc_free) free;
  __typeof__(&lightcc_shutdown) shutdown;
  __typeof__(&lightcc_error) error;
} api;

enum { kRoom = 1024, kWaitMs = 100, kWaits = 600 };
static int64_t prepared[kRoom]; /* by the tensor's index; 0: not yet */

static void wait_for(int64_t handle, const char* name) {
  int status = LIGHTCC_PENDING;
  for (int waits = 0; status == LIGHTCC_PENDING && waits < kWaits; ++waits) status = api.finish(handle, kWaitMs);
  if (status == LIGHTCC_PENDING) die("%s: not done after %d s", name, kWaits * kWaitMs / 1000);
  if (status != LIGHTCC_OK) die("%s: %s", name, api.error());
}

/* The sum of one tensor, by submit or by prepare. */
static int64_t request_by(int64_t (*function)(const lightcc_request*), const struct tensor* t, uint32_t flags,
                          int32_t set) {
  const lightcc_tensor sent = {
      .input = t->in, .output = t->out, .shape = &t->count, .dtype = LIGHTCC_FLOAT32, .ndim = 1};
  const lightcc_request request = {.size = sizeof request, .tensor_size = sizeof sent, .tensors = &sent, .count = 1,
                                   .kind = LIGHTCC_ALLREDUCE, .flags = flags, .name = t->name, .op = LIGHTCC_SUM,
                                   .prescale = 1.0, .postscale = 1.0, .set = set};
  return function(&request);
}

static void own_blocking(struct tensor* t) {
  int64_t handle = request_by(api.submit, t, LIGHTCC_BLOCK, 0);
  if (handle < 0) die("%s: %s", t->name, api.error());
  if (handle > 0) wait_for(handle, t->name);
}

static void own_start_all(struct tensor* tensors, int count) {
  int64_t ids[kRoom], handles[kRoom];
  if (count > kRoom) die("more than %d tensors", kRoom);
  for (int i = 0; i < count; ++i) {
    struct tensor* t = &tensors[i];
    if (t->index >= kRoom) die("more than %d tensors", kRoom);
    if (prepared[t->index] == 0) prepared[t->index] = request_by(api.prepare, t, 0, 1);
    if (prepared[t->index] < 0) die("prepare %s: %s", t->name, api.error());
    ids[i] = prepared[t->index];
  }
  if (api.start_all(ids, count, handles) != LIGHTCC_OK) die("start: %s", api.error());
  for (int i = 0; i < count; ++i) tensors[i].handle = handles[i];
}

static void own_finish_all(struct tensor* tensors, int count) {
  int64_t started[kRoom];
  for (int i = 0; i < count; ++i) started[i] = tensors[i].handle;
  int status = LIGHTCC_PENDING;
  for (int waits = 0; status == LIGHTCC_PENDING && waits < kWaits; ++waits)
    status = api.finish_all(started, count, kWaitMs);
  if (status == LIGHTCC_PENDING) die("not done after %d s", kWaits * kWaitMs / 1000);
  if (status != LIGHTCC_OK) die("%s", api.error());
}

static void own_forget(struct tensor* tensors, int count) {
  for (int i = 0; i < count; ++i)
    if (prepared[tensors[i].index] > 0) api.discard(prepared[tensors[i].index]), prepared[tensors[i].index] = 0;
}

static void* own_memory(int64_t bytes) {
  void* memory = api.alloc(bytes);
  if (!memory) die("lightcc_alloc of %lld bytes: %s", (long long)bytes, api.error());
  return memory;
}

static void own_memory_back(void* memory) { api.free(memory); }
static void own_close(void) { api.shutdown(); }

void open_lightcc(struct library* library, const char* path) {
  void* opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!opened) die("cannot open %s: %s", path, dlerror());
  __typeof__(&lightcc_init) init = symbol_of(opened, "lightcc_init");
  __typeof__(&lightcc_rank) rank = symbol_of(opened, "lightcc_rank");
  __typeof__(&lightcc_size) size = symbol_of(opened, "lightcc_size");
  __typeof__(&lightcc_version) version = symbol_of(opened, "lightcc_version");
  api.submit = symbol_of(opened, "lightcc_submit");
  api.prepare = symbol_of(opened, "lightcc_prepare");
  api.start_all = symbol_of(opened, "lightcc_start_all");
  api.discard = symbol_of(opened, "lightcc_discard");
  api.finish = symbol_of(opened, "lightcc_finish");
  api.finish_all = symbol_of(opened, "lightcc_finish_all");
  api.alloc = symbol_of(opened, "lightcc_alloc");
  api.free = symbol_of(opened, "lightcc_free");
  api.shutdown = symbol_of(opened, "lightcc_shutdown");
  api.error = symbol_of(opened, "lightcc_error");
  if (init() != LIGHTCC_OK) die("lightcc_init: %s", api.error());
  library->rank = rank(), library->size = size();
  strncpy(library->version, version(), sizeof library->version - 1);
  library->allreduce = own_blocking, library->start = own_start_all, library->finish = own_finish_all;
  library->allocate = own_memory, library->release = own_memory_back;
  library->forget = own_forget, library->close = own_close;
}
