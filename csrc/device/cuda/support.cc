#include "device/cuda/support.h"

#include <algorithm>
#include <climits>

#include "base/error.h"
#include "device/cuda/compile.h"
#include "device/cuda/gpu.h"

namespace lightcc {
namespace {

constexpr int kWithoutDriver = 13000;  // which NVRTC is looked for where no driver says how new it may be
constexpr int kAnyGpu = INT_MAX;

template <class Body> GpuSupport support_of(const std::string& without, Body body) {
  try {
    return {true, body()};
  } catch (const Error& error) {
    return {false, without + error.what()};
  }
}

std::vector<int> architectures() {
  const DriverFunctions& driver = cuda_driver();
  int count = 0;
  check_driver(driver.DeviceGetCount(&count), "cuDeviceGetCount");
  std::vector<int> all;
  for (int number = 0; number < count; ++number) {
    int device = 0;
    check_driver(driver.DeviceGet(&device, number), "cuDeviceGet");
    all.push_back(architecture_of(driver, device));
  }
  return all;
}

}  // namespace

std::vector<GpuSupport> gpu_support() {
  std::vector<int> gpus;
  int version = kWithoutDriver;
  const GpuSupport driver = support_of("CUDA driver: ", [&] {
    version = cuda_driver_version();
    gpus = architectures();
    std::string text = "CUDA driver " + cuda_version_text(version) + ", GPUs: " + (gpus.empty() ? "none" : "");
    for (size_t i = 0; i < gpus.size(); ++i) text += (i > 0 ? ", sm_" : "sm_") + std::to_string(gpus[i]);
    return text;
  });
  const GpuSupport compiler = support_of("", [&] {
    const Nvrtc& found = nvrtc(version, gpus.empty() ? kAnyGpu : *std::ranges::min_element(gpus));
    for (int architecture : gpus) target_for(nvrtc(version, architecture), architecture, version);
    return "NVRTC " + cuda_version_text(found.version) + " (" + found.path + ")";
  });
  return {driver, compiler};
}

}  // namespace lightcc
