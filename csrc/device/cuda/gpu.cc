#include "device/cuda/gpu.h"

#include <map>
#include <memory>
#include <string>

namespace lightcc {
namespace {

std::unique_ptr<Gpu> make_gpu(int number) {
  const DriverFunctions& driver = cuda_driver();
  auto gpu = std::make_unique<Gpu>();
  check_driver(driver.DeviceGet(&gpu->device, number), "cuDeviceGet");
  int major = 0, minor = 0;
  check_driver(driver.DeviceGetAttribute(&major, kAttributeMajor, gpu->device), "cuDeviceGetAttribute");
  check_driver(driver.DeviceGetAttribute(&minor, kAttributeMinor, gpu->device), "cuDeviceGetAttribute");
  check_driver(driver.DeviceGetAttribute(&gpu->multiprocessors, kAttributeMultiprocessors, gpu->device),
               "cuDeviceGetAttribute");
  gpu->architecture = 10 * major + minor;
  check_driver(driver.DevicePrimaryCtxRetain(&gpu->context, gpu->device), "cuDevicePrimaryCtxRetain");
  return gpu;
}

}  // namespace

void check_driver(int status, const char* attempted) {
  if (status == kCudaSuccess) return;
  const char *text = nullptr, *name = nullptr;
  cuda_driver().GetErrorString(status, &text);
  cuda_driver().GetErrorName(status, &name);
  const std::string words = std::string(attempted) + ": " + (text ? text : "an error without a text") + " (" +
                            (name ? name : std::to_string(status)) + ")";
  if (status == kCudaDeinitialized) throw DriverGone(Code::internal, words);
  throw Error(Code::internal, words);
}

Gpu& gpu_of(int number) {
  static std::mutex mutex;
  static auto& gpus = *new std::map<int, std::unique_ptr<Gpu>>;  // threads may outlive what is destroyed at exit
  std::lock_guard lock(mutex);
  auto& gpu = gpus[number];
  if (!gpu) gpu = make_gpu(number);
  return *gpu;
}

OnDevice::OnDevice(int number) : driver_(cuda_driver()), gpu_(gpu_of(number)) {
  check_driver(driver_.CtxGetCurrent(&before_), "cuCtxGetCurrent");
  if (before_ != gpu_.context) check_driver(driver_.CtxSetCurrent(gpu_.context), "cuCtxSetCurrent");
  driver_.ThreadExchangeStreamCaptureMode(&mode_);
}

OnDevice::~OnDevice() {
  driver_.ThreadExchangeStreamCaptureMode(&mode_);
  if (before_ != gpu_.context) driver_.CtxSetCurrent(before_);
}

}  // namespace lightcc
