#include "device/cuda.h"

#include <dlfcn.h>

#include <mutex>

#include "base/error.h"
#include "device/cuda/driver.h"

namespace lightcc {
namespace {

std::mutex mutex;
const CudaFunctions* opened = nullptr;

[[noreturn]] void refuse(const std::string& why) {
  throw Error(Code::invalid_argument, "tensors of a GPU cannot be taken: " + why);
}

const CudaFunctions* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse("LIGHTCC_CUDA_LIBRARY could not be opened (" + std::string(dlerror()) + ")");
  using Entry = const CudaFunctions* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "lightcc_cuda_functions"));
  const CudaFunctions* functions = entry ? entry() : nullptr;
  if (!functions || functions->size != sizeof(CudaFunctions)) refuse(path + " is of another version of lightcc");
  return functions;
}

const CudaFunctions* open_driver() {
  try {
    cuda_driver();
  } catch (const Error& error) {
    refuse(std::string("CUDA driver: ") + error.what());
  }
  return &driver_functions();
}

}  // namespace

const CudaFunctions& cuda(const std::string& library) {
  std::lock_guard lock(mutex);
  if (!opened) opened = library.empty() ? open_driver() : open_library(library);
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
