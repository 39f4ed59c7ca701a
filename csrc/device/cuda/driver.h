// What lightcc uses of CUDA's driver, declared here: it needs no header of CUDA, and the driver is found when the first
// tensor of a GPU comes. Names, values and layouts are those of cuda.h, with which a test compares them where that is
// installed (tests/unit/device/cuda/cuda_driver_test.cc). Every pointer that is no text is a handle of CUDA's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace lightcc {

// CUresult, of which lightcc looks at these only.
inline constexpr int kCudaSuccess = 0, kCudaInvalidValue = 1, kCudaDeinitialized = 4, kCudaNotFound = 500,
                     kCudaNotReady = 600, kCudaNotSupported = 801, kCudaCaptureImplicit = 906;
inline constexpr int kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostRegisterPortable = 1;
inline constexpr int kCaptureModeRelaxed = 2, kCaptureStatusNone = 0;
inline constexpr int kAttributeMultiprocessors = 16, kAttributeMajor = 75, kAttributeMinor = 76,
                     kAttributeMemoryPools = 115, kFunctionAttributeRegisters = 4;
inline constexpr int kPoolReuseInternalDependencies = 3, kPoolReleaseThreshold = 4;
inline constexpr uintptr_t kStreamPerThread = 2;

struct DriverPoolProperties {  // CUmemPoolProps; later versions use some of what is reserved
  int allocation = 1;          // pinned
  int handles = 0;
  int location = 1;            // on a device
  int device = 0;
  void* security = nullptr;
  unsigned char reserved[64] = {};
};

// The oldest driver that has all of these: 460, of CUDA 11.2.
inline constexpr int kLeastDriver = 11020;
// Kernels of this and later versions take 32,764 bytes of arguments, if NVRTC is as new and the GPU too; others 4 KiB.
inline constexpr int kLongArguments = 12010, kLongArgumentsOn = 70;

// F(name, suffix, the version of CUDA that brought it, arguments) for each: the driver calls it cu<name><suffix>. The
// suffix tells the version that cuda.h means by the name from an older one.
#define LIGHTCC_DRIVER_FUNCTIONS(F)                                                                         \
  F(Init, , 2000, (unsigned flags))                                                                         \
  F(DriverGetVersion, , 2020, (int* version))                                                               \
  F(GetErrorString, , 6000, (int status, const char** text))                                                \
  F(GetErrorName, , 6000, (int status, const char** text))                                                  \
  F(DeviceGet, , 2000, (int* device, int number))                                                           \
  F(DeviceGetCount, , 2000, (int* count))                                                                   \
  F(DeviceGetAttribute, , 2000, (int* value, int attribute, int device))                                    \
  F(DeviceGetPCIBusId, , 4010, (char* id, int bytes, int device))                                           \
  F(DevicePrimaryCtxRetain, , 7000, (void** context, int device))                                           \
  F(CtxGetCurrent, , 4000, (void** context))                                                                \
  F(CtxSetCurrent, , 4000, (void* context))                                                                 \
  F(ThreadExchangeStreamCaptureMode, , 10010, (int* mode))                                                  \
  F(StreamIsCapturing, , 10000, (void* stream, int* status))                                                \
  F(StreamCreate, , 2000, (void** stream, unsigned flags))                                                  \
  F(StreamDestroy, _v2, 4000, (void* stream))                                                               \
  F(StreamWaitEvent, , 3020, (void* stream, void* event, unsigned flags))                                   \
  F(EventCreate, , 2000, (void** event, unsigned flags))                                                    \
  F(EventDestroy, _v2, 4000, (void* event))                                                                 \
  F(EventRecord, , 2000, (void* event, void* stream))                                                       \
  F(EventQuery, , 2000, (void* event))                                                                      \
  F(LaunchHostFunc, , 10000, (void* stream, void (*function)(void*), void* argument))                       \
  F(MemHostRegister, _v2, 6050, (void* begin, size_t bytes, unsigned flags))                                \
  F(MemHostUnregister, , 4000, (void* begin))                                                               \
  F(MemcpyAsync, , 4000, (uintptr_t to, uintptr_t from, size_t bytes, void* stream))                        \
  F(MemPoolCreate, , 11020, (void** pool, const DriverPoolProperties*))                                     \
  F(MemPoolDestroy, , 11020, (void* pool))                                                                  \
  F(MemPoolSetAttribute, , 11020, (void* pool, int attribute, void* value))                                 \
  F(MemAllocFromPoolAsync, , 11020, (uintptr_t* memory, size_t bytes, void* pool, void* stream))            \
  F(MemFreeAsync, , 11020, (uintptr_t memory, void* stream))                                                \
  F(ModuleLoadData, , 2000, (void** module, const void* image))                                             \
  F(ModuleGetFunction, , 2000, (void** function, void* module, const char* name))                           \
  F(FuncGetAttribute, , 2020, (int* value, int attribute, void* function))                                  \
  F(LaunchKernel, , 4000,                                                                                   \
    (void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
     unsigned block_z, unsigned shared_bytes, void* stream, void** arguments, void** extra))

struct DriverFunctions {
#define LIGHTCC_MEMBER(name, suffix, version, arguments) int(*name) arguments;
  LIGHTCC_DRIVER_FUNCTIONS(LIGHTCC_MEMBER)
#undef LIGHTCC_MEMBER
};

// Those of a driver that is not started yet. find: an address by name, or nullptr. Throws Error{invalid_argument} that
// says what the driver lacks.
DriverFunctions find_driver_functions(const std::function<void*(const char*)>& find);

// The driver, started. Opened at the first call, which waits for it. Throws Error{invalid_argument} that says why there
// is none that can be used: each time anew, since a container's may come later.
const DriverFunctions& cuda_driver();
void set_cuda_driver(const DriverFunctions*);  // for tests: what it returns from now on; nullptr: it opens it again

int cuda_driver_version();                     // of CUDA that the driver has: 12040 is 12.4
std::string cuda_version_text(int version);    // "12.4"

}  // namespace lightcc
