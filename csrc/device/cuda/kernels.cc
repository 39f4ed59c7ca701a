#include "device/cuda/kernels.h"

#include <algorithm>
#include <exception>
#include <map>
#include <string_view>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "device/cuda.h"
#include "device/cuda/compile.h"
#include "device/cuda/gpu.h"

namespace lightcc {
namespace {

std::mutex images_mutex;
std::string cache_folder;

// Of all programs of a set. Programs are compiled side by side, since NVRTC has one thread for each.
std::vector<std::string> compile_all(const KernelSet& set, const KernelTarget& target, const Nvrtc& nvrtc) {
  std::vector<KernelSource> programs = kernel_programs();
  std::erase_if(programs, [&](const KernelSource& program) {
    return std::ranges::find(set.programs, std::string_view(program.name)) == set.programs.end();
  });
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
const std::vector<std::string>& images_for(const KernelSet& set, int architecture) {
  using Key = std::pair<const void*, int>;
  static auto& images = *new std::map<Key, std::vector<std::string>>;  // threads may outlive what is destroyed at exit
  std::lock_guard lock(images_mutex);
  const Key key{set.programs.data(), architecture};
  const auto found = images.find(key);
  if (found != images.end()) return found->second;
  const int version = cuda_driver_version();
  const Nvrtc& compiler = nvrtc(version, architecture);
  return images[key] = compile_all(set, target_for(compiler, architecture, version), compiler);
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

void* Kernels::get(const DriverFunctions& driver, int architecture, size_t kernel) {
  std::lock_guard lock(mutex_);
  if (!is_loaded_ && !failure_.empty()) throw Error(Code::internal, failure_);
  load_locked(driver, architecture);
  return functions_[kernel];
}

void Kernels::load_locked(const DriverFunctions& driver, int architecture) {
  if (is_loaded_) return;
  try {
    for (const std::string& image : images_for(set_, architecture)) {
      void* module = nullptr;
      check_driver(driver.ModuleLoadData(&module, image.data()), "cuModuleLoadData");
      for (size_t i = 0; i < functions_.size(); ++i) {
        void* function = nullptr;
        // This, too, may load what is loaded lazily.
        const int status = driver.ModuleGetFunction(&function, module, set_.names[i]);
        if (status == kCudaNotFound) continue;  // another program has it
        check_driver(status, "cuModuleGetFunction");
        int registers = 0;  // a driver that puts even that off has it loaded now
        check_driver(driver.FuncGetAttribute(&registers, kFunctionAttributeRegisters, function), "cuFuncGetAttribute");
        functions_[i] = function;
      }
    }
    is_loaded_ = true;
  } catch (const std::exception& error) {
    if (failure_.empty())
      log(Level::info, std::string("kernels for GPUs cannot be used: ") + error.what());
    failure_ = error.what();
    throw;
  }
}

}  // namespace lightcc
