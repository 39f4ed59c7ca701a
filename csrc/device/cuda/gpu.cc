#include "device/cuda/gpu.h"

#include <map>
#include <memory>
#include <string>

namespace lightcc {
namespace {

int attribute_of(const DriverFunctions& driver, int device, int attribute) {
  int value = 0;
  check_driver(driver.DeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

std::unique_ptr<Gpu> make_gpu(int number) {
  const DriverFunctions& driver = cuda_driver();
  auto gpu = std::make_unique<Gpu>();
  check_driver(driver.DeviceGet(&gpu->device, number), "cuDeviceGet");
  gpu->architecture = architecture_of(driver, gpu->device);
  gpu->multiprocessors = attribute_of(driver, gpu->device, kAttributeMultiprocessors);
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

int architecture_of(const DriverFunctions& driver, int device) {
  return 10 * attribute_of(driver, device, kAttributeMajor) + attribute_of(driver, device, kAttributeMinor);
}

Gpu& gpu_of(int number) {
  static std::mutex mutex;
  static auto& gpus = *new std::map<int, std::unique_ptr<Gpu>>;  // threads may outlive what is destroyed at exit
  std::lock_guard lock(mutex);
  auto& gpu = gpus[number];
  if (!gpu) gpu = make_gpu(number);
  return *gpu;
}

OnDevice::OnDevice(int number) : driver_(cuda_driver()), relaxed_(driver_), gpu_(gpu_of(number)) {
  check_driver(driver_.CtxGetCurrent(&before_), "cuCtxGetCurrent");
  if (before_ != gpu_.context) check_driver(driver_.CtxSetCurrent(gpu_.context), "cuCtxSetCurrent");
}

OnDevice::~OnDevice() {
  if (before_ != gpu_.context) driver_.CtxSetCurrent(before_);
}

}  // namespace lightcc
