// libcuda.so.1 for Python tests: it has all functions that lightcc looks up and no GPU, and is of the version of CUDA
// that LIGHTCC_TEST_DRIVER_VERSION says.
#include <cstdlib>

#include "device/cuda/driver.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC visibility push(default)
extern "C" {

#define cuDriverGetVersion cuWithoutAnswer
#define LIGHTCC_DEFINE(name, suffix, version, arguments) \
  int cu##name##suffix arguments { return 0; }
using lightcc::DriverPoolProperties;
LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_DEFINE)
#undef cuDriverGetVersion

int cuDriverGetVersion(int* version) {
  const char* told = std::getenv("LIGHTCC_TEST_DRIVER_VERSION");
  *version = told ? std::atoi(told) : 0;
  return 0;
}

}
#pragma GCC visibility pop
