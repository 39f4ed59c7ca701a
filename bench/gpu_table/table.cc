// The functions of a table (device/cuda.h) that bench/gpu_kernels.py and tests/gpu/first_use.py measure, under names for
// Python. They compile it, so that the layout of the table is that of the header.
#include <dlfcn.h>

#include <cstddef>

#include "device/cuda.h"

using lightcc::CudaFunctions;

extern "C" {

// The library: lightcc's core, or that of a build before it, whose table may lack the last functions. nullptr: `failure`
// says why.
const CudaFunctions* gpu_table_open(const char* library, const char** failure) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  void* found = opened ? dlsym(opened, "lightcc_cuda_functions") : nullptr;
  if (!found) return *failure = dlerror(), nullptr;
  const CudaFunctions* table = reinterpret_cast<const CudaFunctions* (*)()>(found)();
  if (table->size >= offsetof(CudaFunctions, load_kernels)) return table;
  return *failure = "the library and the header are not of one layout", nullptr;
}

// These return what has failed, or nullptr.
const char* gpu_table_load_kernels(const CudaFunctions* table, int device) {
  return table->size < sizeof *table ? nullptr : table->load_kernels(device);
}

const char* gpu_table_copy(const CudaFunctions* table, int device, void* stream, void* to, const void* from,
                           size_t bytes) {
  return table->copy(device, stream, to, from, bytes);
}

const char* gpu_table_scale(const CudaFunctions* table, int device, void* stream, int dtype, void* to, const void* from,
                            size_t count, double factor) {
  return table->scale(device, stream, dtype, to, from, count, factor);
}

const char* gpu_table_copy_all(const CudaFunctions* table, int device, void* stream, const lightcc::CudaCopy* copies,
                               size_t count) {
  return table->copy_all(device, stream, copies, count);
}

}  // extern "C"
