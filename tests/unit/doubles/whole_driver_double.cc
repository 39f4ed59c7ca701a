// libcuda.so.1 for Python tests: it has all functions that lightcc looks up, and is of the version of CUDA that
// LIGHTCC_TEST_DRIVER_VERSION says. It has one GPU, of the architecture in LIGHTCC_TEST_GPU (70 is sm_70), or none.
#include <cstdlib>

#include "device/cuda/driver.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC visibility push(default)
extern "C" {

#define cuDriverGetVersion cuWithoutAnswer
#define cuDeviceGetCount cuWithoutCount
#define cuDeviceGetAttribute cuWithoutAttribute
#define LIGHTCC_DEFINE(name, suffix, version, arguments) \
  int cu##name##suffix arguments { return 0; }
using lightcc::DriverPoolProperties;
LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_DEFINE)
#undef cuDriverGetVersion
#undef cuDeviceGetCount
#undef cuDeviceGetAttribute

int cuDriverGetVersion(int* version) {
  const char* told = std::getenv("LIGHTCC_TEST_DRIVER_VERSION");
  *version = told ? std::atoi(told) : 0;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = std::getenv("LIGHTCC_TEST_GPU") != nullptr;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int architecture = std::atoi(std::getenv("LIGHTCC_TEST_GPU"));
  *value = attribute == lightcc::kAttributeMajor ? architecture / 10 : architecture % 10;
  return 0;
}

}
#pragma GCC visibility pop
