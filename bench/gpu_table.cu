// The functions of liblightcc_cuda.so (device/cuda.h) that bench/gpu_kernels.py measures, under names for Python.
// bench/gpu.py compiles it, so that the layout of the table is that of the header.
#include <dlfcn.h>

#include "device/cuda.h"

namespace {

const lightcc::CudaFunctions* table;

}  // namespace

extern "C" {

// Returns what has failed, as all of these, or nullptr.
const char* gpu_table_open(const char* library) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!opened) return dlerror();
  void* found = dlsym(opened, "lightcc_cuda_functions");
  if (!found) return dlerror();
  table = reinterpret_cast<const lightcc::CudaFunctions* (*)()>(found)();
  return table->size == sizeof *table ? nullptr : "the library and the header are not of one build";
}

const char* gpu_table_copy(int device, void* stream, void* to, const void* from, size_t bytes) {
  return table->copy(device, stream, to, from, bytes);
}

const char* gpu_table_scale(int device, void* stream, int dtype, void* to, const void* from, size_t count,
                            double factor) {
  return table->scale(device, stream, dtype, to, from, count, factor);
}

const char* gpu_table_copy_all(int device, void* stream, const lightcc::CudaCopy* copies, size_t count) {
  return table->copy_all(device, stream, copies, count);
}

}  // extern "C"
