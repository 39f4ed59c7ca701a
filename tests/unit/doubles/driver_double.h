// A driver of CUDA and an NVRTC for tests of what stands on them (csrc/device/cuda): they note what they are asked for,
// and what is planted fails. Nothing runs there; a kernel is the text of its program. One at a time.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda.h"
#include "device/cuda/driver.h"
#include "device/cuda/kernels.h"
#include "device/cuda/nvrtc.h"

namespace lightcc::test {

class DriverDouble {
 public:
  struct Launch {
    std::string kernel;
    unsigned blocks;
    void* stream;
    uint32_t pieces;  // of a kernel that copies
  };
  // Each device has an architecture of its own, as what is compiled stays in the process. Nothing stays on disk.
  explicit DriverDouble(int version = 13000, int nvrtc_version = 13000) : version_(version) {
    current = this;
    set_kernel_cache("");  // what is no kernel may not be kept, nor may an earlier run's be found
    fill();
    set_cuda_driver(&functions_);
    nvrtc_.version = nvrtc_version;
    nvrtc_.path = "a double";
    fill_nvrtc();
    set_nvrtc(&nvrtc_);
  }
  ~DriverDouble() {
    set_cuda_driver(nullptr);
    set_nvrtc(nullptr);
    current = nullptr;
  }
  DriverDouble(const DriverDouble&) = delete;
  DriverDouble& operator=(const DriverDouble&) = delete;

  // A GPU that no test has used; those of another double may not be used.
  static int new_device() {
    static int last = 0;
    return ++last;
  }
  static int architecture_of(int device) { return 100 + device; }
  static void* context_of(int device) { return reinterpret_cast<void*>(uintptr_t(0x1000 + device)); }
  static void*& current_context() {  // of this thread
    static thread_local void* context = nullptr;
    return context;
  }
  static int& capture_mode() {  // of this thread
    static thread_local int mode = 0;
    return mode;
  }
  void fail(const std::string& function, int status) { failures_[function] = status; }
  void forget_failures() { failures_.clear(); }
  size_t calls(const std::string& function) {
    std::lock_guard lock(mutex_);
    return calls_[function];
  }
  std::vector<Launch> launches;
  std::map<int, uint64_t> pool_settings;
  std::vector<std::string> options;  // of the last program
  bool nvrtc_refuses = false;

 private:
  // What happens beside noting the call.
  static int called(const std::string& function) {
    std::lock_guard lock(current->mutex_);
    ++current->calls_[function];
    const auto planted = current->failures_.find(function);
    return planted == current->failures_.end() ? kCudaSuccess : planted->second;
  }
  template <class Body> static int called(const std::string& function, Body body) {
    const int status = called(function);
    if (status == kCudaSuccess) body();
    return status;
  }

  void fill() {
#define LIGHTCC_DEFAULT(name, suffix, version, arguments) \
  functions_.name = [](auto...) { return called(#name); };
    LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_DEFAULT)
#undef LIGHTCC_DEFAULT
    functions_.DriverGetVersion = [](int* to) { return *to = current->version_, kCudaSuccess; };
    functions_.GetErrorName = [](int status, const char** to) {
      static thread_local std::string text;
      text = "CUDA_ERROR_" + std::to_string(status);
      return *to = text.c_str(), kCudaSuccess;
    };
    functions_.GetErrorString = [](int, const char** to) { return *to = "it failed", kCudaSuccess; };
    functions_.DeviceGet = [](int* device, int number) { return called("DeviceGet", [&] { *device = number; }); };
    functions_.DeviceGetCount = [](int* to) { return called("DeviceGetCount", [&] { *to = 2; }); };
    functions_.DeviceGetAttribute = [](int* to, int attribute, int device) {
      const std::map<int, int> values{{kAttributeMajor, architecture_of(device) / 10},
                                      {kAttributeMinor, architecture_of(device) % 10},
                                      {kAttributeMultiprocessors, 4},
                                      {kAttributeMemoryPools, 1}};
      return called("DeviceGetAttribute", [&] { *to = values.at(attribute); });
    };
    functions_.DevicePrimaryCtxRetain = [](void** to, int device) {
      return called("DevicePrimaryCtxRetain", [&] { *to = context_of(device); });
    };
    functions_.CtxGetCurrent = [](void** to) { return called("CtxGetCurrent", [&] { *to = current_context(); }); };
    functions_.CtxSetCurrent = [](void* context) {
      return called("CtxSetCurrent", [&] { current_context() = context; });
    };
    functions_.ThreadExchangeStreamCaptureMode = [](int* mode) {
      std::swap(*mode, capture_mode());
      return kCudaSuccess;
    };
    functions_.StreamIsCapturing = [](void*, int* to) { return called("StreamIsCapturing", [&] { *to = 0; }); };
    functions_.StreamCreate = [](void** to, unsigned) { return called("StreamCreate", [&] { *to = &current; }); };
    functions_.EventCreate = [](void** to, unsigned) { return called("EventCreate", [&] { *to = &current; }); };
    functions_.MemPoolCreate = [](void** to, const DriverPoolProperties*) {
      return called("MemPoolCreate", [&] { *to = &current; });
    };
    functions_.MemPoolSetAttribute = [](void*, int attribute, void* value) {
      uint64_t number = 0;
      std::memcpy(&number, value, attribute == kPoolReleaseThreshold ? sizeof(uint64_t) : sizeof(int));
      return called("MemPoolSetAttribute", [&] { current->pool_settings[attribute] = number; });
    };
    functions_.MemAllocFromPoolAsync = [](uintptr_t* to, size_t bytes, void*, void*) {
      return called("MemAllocFromPoolAsync", [&] { *to = bytes; });
    };
    functions_.ModuleLoadData = [](void** to, const void* image) {
      return called("ModuleLoadData", [&] { *to = const_cast<void*>(image); });
    };
    functions_.ModuleGetFunction = [](void** to, void* module, const char* name) {
      const std::string image = static_cast<const char*>(module), wanted = name;
      const bool is_scale = wanted.starts_with("lightcc_scale_");
      const bool has = image.find(is_scale ? "lightcc_scale_" : wanted) != image.npos &&
                       (wanted != "lightcc_copy_many" || image.find("-DLIGHTCC_LONG_ARGUMENTS") != image.npos);
      if (!has) return kCudaNotFound;
      return called("ModuleGetFunction", [&] { *to = const_cast<char*>(name); });
    };
    functions_.LaunchKernel = [](void* function, unsigned x, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 void* stream, void** arguments, void**) {
      const char* kernel = static_cast<const char*>(function);
      return called("LaunchKernel", [&] { current->note(kernel, x, stream, arguments[0]); });
    };
  }
  void note(const std::string& kernel, unsigned blocks, void* stream, void* argument);

  void fill_nvrtc() {
    NvrtcFunctions& all = nvrtc_.functions;
    all.GetNumSupportedArchs = [](int* to) { return *to = 5, 0; };
    all.GetSupportedArchs = [](int* to) {
      const int newest[] = {61, 75, 90, 100, 1000};
      return std::copy(std::begin(newest), std::end(newest), to), 0;
    };
    all.CreateProgram = [](void** to, const char* text, const char*, int, const char* const*, const char* const*) {
      return *to = new std::string(text), 0;
    };
    all.DestroyProgram = [](void** program) {
      delete static_cast<std::string*>(*program);
      return 0;
    };
    all.CompileProgram = [](void* program, int count, const char* const* options) {
      std::lock_guard lock(current->mutex_);
      ++current->calls_["CompileProgram"];
      current->options.assign(options, options + count);
      for (int i = 0; i < count; ++i) *static_cast<std::string*>(program) += std::string(" ") + options[i];
      return current->nvrtc_refuses ? 6 : 0;
    };
    all.GetProgramLogSize = [](void*, size_t* to) { return *to = sizeof "line 3: planted", 0; };
    all.GetProgramLog = [](void*, char* to) { return std::strcpy(to, "line 3: planted"), 0; };
    all.GetPTXSize = all.GetCUBINSize = [](void* program, size_t* to) {
      return *to = static_cast<std::string*>(program)->size() + 1, 0;
    };
    all.GetPTX = all.GetCUBIN = [](void* program, char* to) {
      return std::strcpy(to, static_cast<std::string*>(program)->c_str()), 0;
    };
    all.GetErrorString = [](int) { return "NVRTC_ERROR_COMPILATION"; };
  }

  static inline DriverDouble* current = nullptr;

  const int version_;
  DriverFunctions functions_{};
  Nvrtc nvrtc_{};
  std::mutex mutex_;
  std::map<std::string, size_t> calls_;
  std::map<std::string, int> failures_;
};

}  // namespace lightcc::test
