#include "device/cuda/kernels.h"

#include <exception>
#include <map>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "device/cuda.h"
#include "device/cuda/compile.h"
#include "device/cuda/gpu.h"

namespace lightcc {
namespace {

std::mutex images_mutex;
std::string cache_folder;

// Of all programs. Programs are compiled side by side, since NVRTC has one thread for each.
std::vector<std::string> compile_all(const KernelTarget& target, const Nvrtc& nvrtc) {
  const std::vector<KernelSource> programs = kernel_programs();
  const ImageCache cache(cache_folder);
  std::vector<std::string> images(programs.size());
  std::vector<std::exception_ptr> failures(programs.size());
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < programs.size(); ++i)
    threads.emplace_back([&, i] {
      try {
        images[i] = compile_once(cache, nvrtc, programs[i], target);
      } catch (...) {
        failures[i] = std::current_exception();
      }
    });
  threads.clear();  // waits for them
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
  return images;
}

// Once a process for each kind of GPU.
const std::vector<std::string>& images_for(int architecture) {
  static auto& images = *new std::map<int, std::vector<std::string>>;  // threads may outlive what is destroyed at exit
  std::lock_guard lock(images_mutex);
  const auto found = images.find(architecture);
  if (found != images.end()) return found->second;
  const int version = cuda_driver_version();
  const Nvrtc& compiler = nvrtc(version);
  return images[architecture] = compile_all(target_for(compiler, architecture, version), compiler);
}

}  // namespace

void set_kernel_cache(const std::string& folder) {
  std::lock_guard lock(images_mutex);
  cache_folder = folder;
}

void Kernels::load(const DriverFunctions& driver, int architecture) {
  std::lock_guard lock(mutex_);
  load_locked(driver, architecture);
}

void* Kernels::get(const DriverFunctions& driver, int architecture, GpuKernel kernel) {
  std::lock_guard lock(mutex_);
  if (!is_loaded_ && !failure_.empty()) throw Error(Code::internal, failure_);
  load_locked(driver, architecture);
  return functions_[size_t(kernel)];
}

void Kernels::load_locked(const DriverFunctions& driver, int architecture) {
  if (is_loaded_) return;
  try {
    for (const std::string& image : images_for(architecture)) {
      void* module = nullptr;
      check_driver(driver.ModuleLoadData(&module, image.data()), "cuModuleLoadData");
      for (size_t i = 0; i < functions_.size(); ++i) {
        void* function = nullptr;
        if (driver.ModuleGetFunction(&function, module, kKernelNames[i]) != kCudaSuccess) continue;
        int registers = 0;  // asking loads what is loaded lazily
        check_driver(driver.FuncGetAttribute(&registers, kFunctionAttributeRegisters, function), "cuFuncGetAttribute");
        functions_[i] = function;
      }
    }
    is_loaded_ = true;
  } catch (const std::exception& error) {
    if (failure_.empty())
      log(Level::info, std::string("kernels for GPUs cannot be used, tensors are copied one by one: ") + error.what());
    failure_ = error.what();
    throw;
  }
}

}  // namespace lightcc
