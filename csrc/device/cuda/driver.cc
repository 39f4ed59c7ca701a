#include "device/cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace lightcc {
namespace {

std::mutex mutex;
std::atomic<const DriverFunctions*> opened{nullptr};

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

int version_of(int (*get_version)(int*)) {
  int version = 0;
  return get_version && get_version(&version) == kCudaSuccess ? version : 0;
}

const DriverFunctions* open_driver() {
  static std::optional<DriverFunctions> functions;  // of a library that is never closed
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse(std::string("there is none here (") + dlerror() + ")");
  functions = find_driver_functions([=](const char* name) { return dlsym(library, name); });
  if (const int status = functions->Init(0); status != kCudaSuccess) {
    const char *text = "an error without a text", *name = "?";
    functions->GetErrorString(status, &text);
    functions->GetErrorName(status, &name);
    refuse(std::string("it does not start: ") + text + " (" + name + ")");
  }
  return &*functions;
}

}  // namespace

DriverFunctions find_driver_functions(const std::function<void*(const char*)>& find) {
  DriverFunctions all{};
  std::string absent;
#define LIGHTCC_LOOK_UP(name, suffix, version, arguments)                               \
  all.name = reinterpret_cast<int(*) arguments>(find("cu" #name #suffix));              \
  if (!all.name) absent = "cu" #name #suffix;
  LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_LOOK_UP)
#undef LIGHTCC_LOOK_UP
  const int version = version_of(all.DriverGetVersion);
  if (version < kLeastDriver)
    refuse("it is too old: it is of CUDA " + cuda_version_text(version) + ", and lightcc needs " +
           cuda_version_text(kLeastDriver) + ", which comes with the drivers from 460 on");
  if (!absent.empty()) refuse("it is of CUDA " + cuda_version_text(version) + ", but has no " + absent);
  return all;
}

const DriverFunctions& cuda_driver() {
  if (const DriverFunctions* functions = opened) return *functions;
  std::lock_guard lock(mutex);
  if (!opened) opened = open_driver();
  return *opened;
}

void set_cuda_driver(const DriverFunctions* functions) {
  std::lock_guard lock(mutex);
  opened = functions;
}

int cuda_driver_version() { return version_of(cuda_driver().DriverGetVersion); }

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace lightcc
