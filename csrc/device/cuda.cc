#include "device/cuda.h"

#include <dlfcn.h>

#include <mutex>

#include "base/core_folder.h"
#include "base/error.h"

namespace lightcc {
namespace {

constexpr const char* kLibrary = "liblightcc_cuda.so";
constexpr const char* kEntry = "lightcc_cuda_functions";

std::mutex mutex;
const CudaFunctions* opened = nullptr;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Code::invalid_argument, "tensors of a GPU cannot be taken: " + why);
}

const CudaFunctions* open_library(const std::string& given) {
  if (given.empty() && !dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL))
    refuse(std::string("there is no CUDA driver here (") + dlerror() + ")");
  const std::string path = given.empty() ? core_folder() + kLibrary : given;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library)
    refuse("lightcc's CUDA library could not be opened (" + std::string(dlerror()) +
           "); it is part of lightcc where that was built with nvcc");
  using Entry = const CudaFunctions* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, kEntry));
  const CudaFunctions* functions = entry ? entry() : nullptr;
  if (!functions || functions->size != sizeof(CudaFunctions)) refuse(path + " is of another version of lightcc");
  return functions;
}

}  // namespace

const CudaFunctions& cuda(const std::string& library) {
  std::lock_guard lock(mutex);
  if (!opened) opened = open_library(library);
  return *opened;
}

void set_cuda(const CudaFunctions* functions) {
  std::lock_guard lock(mutex);
  opened = functions;
}

void check_cuda(const char* failure, const char* attempted, int device) {
  if (failure)
    throw Error(Code::internal, std::string(attempted) + " on GPU " + std::to_string(device) + ": " + failure);
}

}  // namespace lightcc
