// Pieces on a GPU, encoded and decoded by the table of lightcc's core (device/cuda.h); memory by CUDA's runtime.
#pragma once
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "base/types.h"
#include "device/cuda.h"

namespace lightcc::test {

inline void check_runtime(int status, const char* attempted) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(attempted) + ": " + cudaGetErrorString(cudaError_t(status)));
}
inline void check_table(const char* failure) {
  if (failure) throw std::runtime_error(failure);
}

struct GpuMemory {
  static void* allocate(size_t bytes) {
    void* memory = nullptr;
    check_runtime(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  static void release(void* memory) { cudaFree(memory); }
  static void write(void* to, const void* from, size_t bytes) {
    check_runtime(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the GPU");
  }
  static void read(void* to, const void* from, size_t bytes) {
    check_runtime(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the GPU");
  }
};

// Of the core, with its kernels for codecs compiled.
inline const CudaFunctions& open_codecs(const char* core) {
  void* library = dlopen(core, RTLD_NOW | RTLD_LOCAL);
  void* found = library ? dlsym(library, "lightcc_cuda_functions") : nullptr;
  if (!found) throw std::runtime_error(dlerror());
  const CudaFunctions& table = *reinterpret_cast<const CudaFunctions* (*)()>(found)();
  if (table.size != sizeof table) throw std::runtime_error("the library and the header are not of one layout");
  check_runtime(cudaFree(nullptr), "cudaFree");  // now there is a context
  check_table(table.load_codecs(0));
  return table;
}

// error: of decoding, 8 bytes of the GPU.
template <class Piece>
void run_codec(const CudaFunctions& table, void* stream, CodecKind kind, const std::vector<Piece>& pieces,
               uint64_t* error) {
  if constexpr (std::is_same_v<Piece, CudaEncode>)
    check_table(table.encode(0, stream, int(kind), pieces.data(), pieces.size()));
  else
    check_table(table.decode(0, stream, int(kind), pieces.data(), pieces.size(), error));
}

}  // namespace lightcc::test
