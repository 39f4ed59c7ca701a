// Fills the table of device/cuda.h with the CUDA runtime. liblightcc_cuda.so carries a runtime of its own, linked
// statically: it opens the driver at the first call, and works with the same context of a device as the framework's.
#include "device/cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "device/cuda/kernels.h"

namespace lightcc {
namespace {

// The driver's functions that the runtime has none for. cudart opens the same library, so it is never unloaded.
struct Driver {
  CUresult (*get_context)(CUcontext*) = nullptr;
  CUresult (*set_context)(CUcontext) = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;  // the runtime's next call says so
    get_context = reinterpret_cast<decltype(get_context)>(dlsym(library, "cuCtxGetCurrent"));
    set_context = reinterpret_cast<decltype(set_context)>(dlsym(library, "cuCtxSetCurrent"));
  }
};

const Driver& driver() {
  static const Driver driver;
  return driver;
}

// Makes the device the thread's current one, and gives the thread back the context it had. A thread that had none gets
// none: cudaSetDevice(0) would instead create one on device 0, some hundred MiB of it for every process of the host.
// A graph that the framework captures in another thread is not ended by what is done here (relaxed mode).
class OnDevice {
 public:
  explicit OnDevice(int device) {
    const bool known = driver().get_context && driver().get_context(&context_) == CUDA_SUCCESS && context_;
    int current = -1;
    moved_ = !(known && cudaGetDevice(&current) == cudaSuccess && current == device);
    if (moved_) status_ = cudaSetDevice(device);
    if (status_ == cudaSuccess) status_ = cudaThreadExchangeStreamCaptureMode(&mode_);
    exchanged_ = status_ == cudaSuccess;
  }
  ~OnDevice() {
    if (exchanged_) cudaThreadExchangeStreamCaptureMode(&mode_);
    if (moved_ && driver().set_context) driver().set_context(context_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  cudaError_t status() const { return status_; }

 private:
  CUcontext context_ = nullptr;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  cudaError_t status_ = cudaSuccess;
  bool moved_ = false, exchanged_ = false;
};

const char* in_words(cudaError_t status, const char* attempted) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // else a later, successful call seems to have failed
  static thread_local char words[256];
  std::snprintf(words, sizeof words, "%s: %s (%s)", attempted, cudaGetErrorString(status), cudaGetErrorName(status));
  return words;
}

template <class Call>
cudaError_t on_device(int device, Call call) {
  const OnDevice here(device);
  return here.status() == cudaSuccess ? call() : here.status();
}

// At the end of the process the driver may go first, and takes everything with it.
const char* given_back(cudaError_t status, const char* attempted) {
  return in_words(status == cudaErrorCudartUnloading ? cudaSuccess : status, attempted);
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

const char* count_devices(int* count) {
  *count = 0;
  return in_words(cudaGetDeviceCount(count), "cudaGetDeviceCount");
}

const char* refuse_stream(int device, void* stream) {
  if (stream_of(stream) == cudaStreamPerThread)
    return "the per-thread default stream is another one in each thread: use a stream that has a handle of its own";
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const auto status = on_device(device, [&] { return cudaStreamIsCapturing(stream_of(stream), &capture); });
  if (status != cudaSuccess) cudaGetLastError();  // what is wrong with it, its next use says
  if (status == cudaErrorStreamCaptureImplicit || capture != cudaStreamCaptureStatusNone)
    return "the stream captures a graph, in which there can be no collective";
  return nullptr;
}

// Kernels are loaded here, where nothing of ours runs yet that a device could wait for.
const char* create_stream(int device, void** stream) {
  cudaStream_t made = nullptr;
  const auto status = on_device(device, [&] {
    if (load_kernels() != cudaSuccess) cudaGetLastError();  // a launch says why; all else works without them
    return cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);
  });
  *stream = made;
  return in_words(status, "cudaStreamCreateWithFlags");
}

const char* destroy_stream(int device, void* stream) {
  return given_back(on_device(device, [&] { return cudaStreamDestroy(stream_of(stream)); }), "cudaStreamDestroy");
}

const char* create_event(int device, void** event) {
  cudaEvent_t made = nullptr;
  const auto status = on_device(device, [&] { return cudaEventCreateWithFlags(&made, cudaEventDisableTiming); });
  *event = made;
  return in_words(status, "cudaEventCreateWithFlags");
}

const char* destroy_event(int device, void* event) {
  return given_back(on_device(device, [&] { return cudaEventDestroy(event_of(event)); }), "cudaEventDestroy");
}

const char* record(int device, void* event, void* stream) {
  const auto status = on_device(device, [&] { return cudaEventRecord(event_of(event), stream_of(stream)); });
  return in_words(status, "cudaEventRecord");
}

const char* order(int device, void* stream, void* event) {
  const auto status = on_device(device, [&] { return cudaStreamWaitEvent(stream_of(stream), event_of(event), 0); });
  return in_words(status, "cudaStreamWaitEvent");
}

const char* query(int device, void* event, int* reached) {
  const auto status = on_device(device, [&] { return cudaEventQuery(event_of(event)); });
  *reached = status == cudaSuccess;
  if (status != cudaErrorNotReady) return in_words(status, "cudaEventQuery");
  cudaGetLastError();
  return nullptr;
}

const char* call(int device, void* stream, void (*function)(void*), void* argument) {
  const auto status = on_device(device, [&] { return cudaLaunchHostFunc(stream_of(stream), function, argument); });
  return in_words(status, "cudaLaunchHostFunc");
}

// Memory that is registered already is refused: whoever registered it may end that under our copies, and unpin would
// end it under theirs.
const char* pin(int device, void* begin, size_t bytes) {
  const auto status = on_device(device, [&] { return cudaHostRegister(begin, bytes, cudaHostRegisterPortable); });
  return in_words(status, "cudaHostRegister");
}

const char* unpin(int device, void* begin) {
  return given_back(on_device(device, [&] { return cudaHostUnregister(begin); }), "cudaHostUnregister");
}

const char* copy(int device, void* stream, void* to, const void* from, size_t bytes) {
  const auto status = on_device(
      device, [&] { return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)); });
  return in_words(status, "cudaMemcpyAsync");
}

const char* copy_all(int device, void* stream, const CudaCopy* copies, size_t count) {
  const auto status = on_device(device, [&] { return launch_copies(device, stream_of(stream), copies, count); });
  return in_words(status, "launch of the kernel that copies");
}

// So much memory a pool keeps for the next allocations. What it has beyond that and nobody uses goes back to the driver
// when the process synchronises: the framework needs memory too. To keep none would mean to get new memory each time.
constexpr uint64_t kKeptBytes = uint64_t(256) << 20;

// A pool of our own, since the settings of the device's default pool are the framework's.
cudaError_t make_pool(int device, cudaMemPool_t* pool) {
  int has_pools = 0;
  cudaError_t status = cudaDeviceGetAttribute(&has_pools, cudaDevAttrMemoryPoolsSupported, device);
  if (status == cudaSuccess && !has_pools) status = cudaErrorNotSupported;
  if (status != cudaSuccess) return status;
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  status = cudaMemPoolCreate(pool, &properties);
  if (status != cudaSuccess) return status;
  uint64_t kept = kKeptBytes;
  status = cudaMemPoolSetAttribute(*pool, cudaMemPoolAttrReleaseThreshold, &kept);
  // Else an allocation may make its stream wait for another one, which may itself wait for another rank.
  int allowed = 0;
  if (status == cudaSuccess)
    status = cudaMemPoolSetAttribute(*pool, cudaMemPoolReuseAllowInternalDependencies, &allowed);
  if (status != cudaSuccess) cudaMemPoolDestroy(*pool);
  return status;
}

// Made at the first allocation and kept; the map too, since threads may outlive what is destroyed at exit.
cudaError_t pool_of(int device, cudaMemPool_t* pool) {
  static std::mutex mutex;
  static auto& pools = *new std::map<int, cudaMemPool_t>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = pools.find(device);
  if (found != pools.end()) return *pool = found->second, cudaSuccess;
  const cudaError_t status = make_pool(device, pool);
  if (status == cudaSuccess) pools[device] = *pool;
  return status;
}

const char* allocate(int device, void* stream, size_t bytes, void** memory) {
  *memory = nullptr;
  if (bytes == 0) return nullptr;
  const auto status = on_device(device, [&] {
    cudaMemPool_t pool = nullptr;
    const cudaError_t made = pool_of(device, &pool);
    return made == cudaSuccess ? cudaMallocFromPoolAsync(memory, bytes, pool, stream_of(stream)) : made;
  });
  if (status == cudaErrorNotSupported)
    return in_words(status, "the device has no memory pools (cudaDevAttrMemoryPoolsSupported)");
  return in_words(status, "cudaMallocFromPoolAsync");
}

const char* release(int device, void* stream, void* memory) {
  if (!memory) return nullptr;
  return given_back(on_device(device, [&] { return cudaFreeAsync(memory, stream_of(stream)); }), "cudaFreeAsync");
}

const char* scale(int device, void* stream, int dtype, void* to, const void* from, size_t count, double factor) {
  const auto status = on_device(
      device, [&] { return launch_scale(device, stream_of(stream), dtype, to, from, count, factor); });
  return in_words(status, "launch of the kernel that scales");
}

const char* run_on_device(int device, void (*function)(void*), void* argument) {
  return in_words(on_device(device, [&] { return function(argument), cudaSuccess; }), "cudaSetDevice");
}

const char* bus_id(int device, char* id, size_t bytes) {
  return in_words(cudaDeviceGetPCIBusId(id, static_cast<int>(bytes), device), "cudaDeviceGetPCIBusId");
}

constexpr CudaFunctions kFunctions = {sizeof(CudaFunctions),
                                      count_devices,
                                      refuse_stream,
                                      create_stream,
                                      destroy_stream,
                                      create_event,
                                      destroy_event,
                                      record,
                                      order,
                                      query,
                                      call,
                                      pin,
                                      unpin,
                                      copy,
                                      copy_all,
                                      allocate,
                                      release,
                                      scale,
                                      run_on_device,
                                      bus_id};

}  // namespace
}  // namespace lightcc

extern "C" __attribute__((visibility("default"))) const lightcc::CudaFunctions* lightcc_cuda_functions() {
  return &lightcc::kFunctions;
}
