// Fills the table of device/cuda.h with CUDA's driver.
#include <algorithm>
#include <cstdio>
#include <exception>

#include "base/error.h"
#include "device/cuda.h"
#include "device/cuda/codecs.h"
#include "device/cuda/gpu.h"
#include "device/cuda/launch.h"
#include "device/cuda/pack.h"
#include "device/cuda/scale.h"

namespace lightcc {
namespace {

template <class Body> const char* attempt(Body body) {
  static thread_local char words[2048];  // still there when the process ends
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    std::snprintf(words, sizeof words, "%s", error.what());
    return words;
  }
}

// body: called with the device as the thread's current one.
template <class Body> const char* attempt_on(int device, Body body) {
  return attempt([&] {
    const OnDevice here(device);
    body(here.driver(), here.gpu());
  });
}

// At the end of the process the driver may go first, and takes everything with it.
template <class Body> const char* give_back_on(int device, Body body) {
  return attempt([&] {
    try {
      const OnDevice here(device);
      body(here.driver());
    } catch (const DriverGone&) {
    }
  });
}

uintptr_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

const char* count_devices(int* count) {
  *count = 0;
  return attempt([&] { check_driver(cuda_driver().DeviceGetCount(count), "cuDeviceGetCount"); });
}

const char* refuse_stream(int device, void* stream) {
  if (address_of(stream) == kStreamPerThread)
    return "the per-thread default stream is another one in each thread: use a stream that has a handle of its own";
  int status = kCudaSuccess, capture = kCaptureStatusNone;
  const char* failure = attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    status = driver.StreamIsCapturing(stream, &capture);
  });
  if (failure) return failure;
  if (status == kCudaCaptureImplicit || (status == kCudaSuccess && capture != kCaptureStatusNone))
    return "the stream captures a graph, in which there can be no collective";
  return nullptr;  // what else is wrong with it, its next use says
}

const char* load_kernels(int device) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) {
    gpu.kernels.load(driver, gpu.architecture);
  });
}

// Kernels are loaded here, where nothing of ours runs yet that a device could wait for. If there are none, a launch
// says why, and all else works.
const char* create_stream(int device, void** stream) {
  *stream = nullptr;
  load_kernels(device);
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    check_driver(driver.StreamCreate(stream, kStreamNonBlocking), "cuStreamCreate");
  });
}

const char* destroy_stream(int device, void* stream) {
  return give_back_on(device, [&](const DriverFunctions& driver) {
    check_driver(driver.StreamDestroy(stream), "cuStreamDestroy");
  });
}

const char* create_event(int device, void** event) {
  *event = nullptr;
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    check_driver(driver.EventCreate(event, kEventDisableTiming), "cuEventCreate");
  });
}

const char* destroy_event(int device, void* event) {
  return give_back_on(device, [&](const DriverFunctions& driver) {
    check_driver(driver.EventDestroy(event), "cuEventDestroy");
  });
}

const char* record(int device, void* event, void* stream) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    check_driver(driver.EventRecord(event, stream), "cuEventRecord");
  });
}

const char* order(int device, void* stream, void* event) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    check_driver(driver.StreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
  });
}

const char* query(int device, void* event, int* reached) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    const int status = driver.EventQuery(event);
    *reached = status == kCudaSuccess;
    if (status != kCudaNotReady) check_driver(status, "cuEventQuery");
  });
}

const char* call(int device, void* stream, void (*function)(void*), void* argument) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    check_driver(driver.LaunchHostFunc(stream, function, argument), "cuLaunchHostFunc");
  });
}

// Memory that is registered already is refused: whoever registered it may end that under our copies, and unpin would
// end it under theirs.
const char* pin(int device, void* begin, size_t bytes) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) {
    check_driver(driver.MemHostRegister(begin, bytes, kHostRegisterPortable), "cuMemHostRegister");
  });
}

const char* unpin(int device, void* begin) {
  return give_back_on(device, [&](const DriverFunctions& driver) {
    check_driver(driver.MemHostUnregister(begin), "cuMemHostUnregister");
  });
}

void copy_one(const DriverFunctions& driver, void* stream, void* to, const void* from, size_t bytes) {
  if (bytes > 0)
    check_driver(driver.MemcpyAsync(address_of(to), address_of(from), bytes, stream), "cuMemcpyAsync");
}

const char* copy(int device, void* stream, void* to, const void* from, size_t bytes) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu&) { copy_one(driver, stream, to, from, bytes); });
}

void launch(const DriverFunctions& driver, void* kernel, void* stream, size_t blocks, void** arguments,
            const char* attempted) {
  check_driver(driver.LaunchKernel(kernel, static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, 0, stream, arguments,
                                   nullptr),
               attempted);
}

size_t most_blocks(const Gpu& gpu) { return kBlocksPerMultiprocessor * static_cast<size_t>(gpu.multiprocessors); }

// Copies the first of them, as many as one launch takes; returns how many these are.
template <class Pieces>
size_t launch_copies(const DriverFunctions& driver, Gpu& gpu, void* kernel, void* stream, const CudaCopy* copies,
                     size_t count) {
  Pieces pieces{};
  const size_t taken = packing::take(pieces, copies, count);
  void* arguments[] = {&pieces};
  if (pieces.count == 1)  // the driver knows how best to copy that
    copy_one(driver, stream, pieces.to[0], pieces.from[0], pieces.bytes[0]);
  else if (pieces.count > 1)
    launch(driver, kernel, stream, std::min<size_t>(packing::tiles_of(pieces), most_blocks(gpu)), arguments,
           "launch of the kernel that copies");
  return taken;
}

// nullptr: there are no kernels.
void* find_kernel(const DriverFunctions& driver, Gpu& gpu, GpuKernel kernel) {
  try {
    return gpu.kernels.get(driver, gpu.architecture, kernel);
  } catch (const Error&) {
    return nullptr;
  }
}

const char* copy_all(int device, void* stream, const CudaCopy* copies, size_t count) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) {
    void* const few = find_kernel(driver, gpu, GpuKernel::copy_few);
    void* const many = find_kernel(driver, gpu, GpuKernel::copy_many);
    for (size_t done = 0; done < count;) {
      const CudaCopy* next = copies + done;
      const size_t left = count - done;
      if (!few)
        copy_one(driver, stream, next->to, next->from, next->bytes), ++done;
      else if (many && left > packing::FewPieces::kRoom)
        done += launch_copies<packing::ManyPieces>(driver, gpu, many, stream, next, left);
      else
        done += launch_copies<packing::FewPieces>(driver, gpu, few, stream, next, left);
    }
  });
}

const char* allocate(int device, void* stream, size_t bytes, void** memory) {
  *memory = nullptr;
  if (bytes == 0) return nullptr;
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) {
    uintptr_t address = 0;
    const int status = driver.MemAllocFromPoolAsync(&address, bytes, pool_of(driver, gpu), stream);
    check_driver(status, "cuMemAllocFromPoolAsync");
    *memory = reinterpret_cast<void*>(address);
  });
}

const char* release(int device, void* stream, void* memory) {
  if (!memory) return nullptr;
  return give_back_on(device, [&](const DriverFunctions& driver) {
    check_driver(driver.MemFreeAsync(address_of(memory), stream), "cuMemFreeAsync");
  });
}

const char* scale(int device, void* stream, int dtype, void* to, const void* from, size_t count, double factor) {
  constexpr const char* attempted = "launch of the kernel that scales";
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) {
    const bool known = scaling::with_format(dtype, [&](auto format) {
      if (count == 0) return;
      const auto which = static_cast<GpuKernel>(static_cast<size_t>(GpuKernel::scale) + static_cast<size_t>(dtype));
      void* const kernel = gpu.kernels.get(driver, gpu.architecture, which);
      scaling::Factor by(factor);
      void* arguments[] = {&to, &from, &count, &by};
      const size_t vectors = count * sizeof(typename decltype(format)::Stored) / sizeof(scaling::Vector);
      launch(driver, kernel, stream, std::min(vectors / kThreads + 1, most_blocks(gpu)), arguments, attempted);
    });
    if (!known) check_driver(kCudaInvalidValue, attempted);
  });
}

const char* run_on_device(int device, void (*function)(void*), void* argument) {
  return attempt_on(device, [&](const DriverFunctions&, Gpu&) { function(argument); });
}

const char* bus_id(int device, char* id, size_t bytes) {
  return attempt([&] {
    int handle = 0;
    check_driver(cuda_driver().DeviceGet(&handle, device), "cuDeviceGet");
    check_driver(cuda_driver().DeviceGetPCIBusId(id, static_cast<int>(bytes), handle), "cuDeviceGetPCIBusId");
  });
}

const char* encode(int device, void* stream, int codec, const CudaEncode* pieces, size_t count) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) {
    encode_pieces(driver, gpu, stream, codec, pieces, count);
  });
}

const char* decode(int device, void* stream, int codec, const CudaDecode* pieces, size_t count, uint64_t* error) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) {
    decode_pieces(driver, gpu, stream, codec, pieces, count, error);
  });
}

const char* load_codec_kernels(int device) {
  return attempt_on(device, [&](const DriverFunctions& driver, Gpu& gpu) { load_codecs(driver, gpu); });
}

constexpr CudaFunctions kFunctions = {.size = sizeof(CudaFunctions),
                                      .count_devices = count_devices,
                                      .refuse_stream = refuse_stream,
                                      .create_stream = create_stream,
                                      .destroy_stream = destroy_stream,
                                      .create_event = create_event,
                                      .destroy_event = destroy_event,
                                      .record = record,
                                      .order = order,
                                      .query = query,
                                      .call = call,
                                      .pin = pin,
                                      .unpin = unpin,
                                      .copy = copy,
                                      .copy_all = copy_all,
                                      .allocate = allocate,
                                      .release = release,
                                      .scale = scale,
                                      .on_device = run_on_device,
                                      .bus_id = bus_id,
                                      .load_kernels = load_kernels,
                                      .encode = encode,
                                      .decode = decode,
                                      .load_codecs = load_codec_kernels};

}  // namespace

const CudaFunctions& driver_functions() { return kFunctions; }

}  // namespace lightcc

// For tests and benchmarks of the functions alone, in the form of a library that LIGHTCC_CUDA_LIBRARY names.
extern "C" __attribute__((visibility("default"))) const lightcc::CudaFunctions* lightcc_cuda_functions() {
  return &lightcc::kFunctions;
}
