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

// So much memory a pool keeps for the next allocations. What it has beyond that and nobody uses goes back to the driver
// when the process synchronises: the framework needs memory too. To keep none would mean to get new memory each time.
constexpr uint64_t kKeptBytes = uint64_t(256) << 20;

// A pool of our own, since the settings of the device's default pool are the framework's.
void* make_pool(const DriverFunctions& driver, const Gpu& gpu) {
  int has_pools = 0;
  check_driver(driver.DeviceGetAttribute(&has_pools, kAttributeMemoryPools, gpu.device), "cuDeviceGetAttribute");
  check_driver(has_pools ? kCudaSuccess : kCudaNotSupported,
               "the device has no memory pools (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)");
  DriverPoolProperties properties;
  properties.device = gpu.device;
  void* pool = nullptr;
  check_driver(driver.MemPoolCreate(&pool, &properties), "cuMemPoolCreate");
  uint64_t kept = kKeptBytes;
  int status = driver.MemPoolSetAttribute(pool, kPoolReleaseThreshold, &kept);
  // Else an allocation may make its stream wait for another one, which may itself wait for another rank.
  int allowed = 0;
  if (status == kCudaSuccess) status = driver.MemPoolSetAttribute(pool, kPoolReuseInternalDependencies, &allowed);
  if (status != kCudaSuccess) driver.MemPoolDestroy(pool);
  check_driver(status, "cuMemPoolSetAttribute");
  return pool;
}

}  // namespace

void* pool_of(const DriverFunctions& driver, Gpu& gpu) {
  std::lock_guard lock(gpu.pool_mutex);
  if (!gpu.pool) gpu.pool = make_pool(driver, gpu);
  return gpu.pool;
}

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
