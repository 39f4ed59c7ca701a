// What lightcc needs of CUDA, as one table of plain functions, so that the core itself links nothing of it. The driver
// of CUDA fills the table (device/cuda/functions.cc) and is opened when the first tensor of a GPU comes; tests fill it
// with host memory whose streams are threads (tests/unit/doubles/cuda_double.h).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace lightcc {

struct CudaCopy {
  void* to;
  const void* from;
  size_t bytes;
};

// Every function returns nullptr, or what has failed, in words that stay valid in the calling thread until its next
// call. Any thread may call, and has the same current device afterwards. Nothing waits for a device, but maybe pin and
// unpin. Streams and events are CUDA's own handles; the stream nullptr is the default stream of the device.
struct CudaFunctions {
  uint32_t size;  // sizeof(CudaFunctions): of another one nothing is called
  const char* (*count_devices)(int* count);
  const char* (*refuse_stream)(int device, void* stream);  // why it cannot take part: it captures a graph, for instance
  const char* (*create_stream)(int device, void** stream);  // does not wait for the default stream, nor that for it
  const char* (*destroy_stream)(int device, void* stream);
  const char* (*create_event)(int device, void** event);
  const char* (*destroy_event)(int device, void* event);
  const char* (*record)(int device, void* event, void* stream);
  const char* (*order)(int device, void* stream, void* event);  // what the stream gets from now on runs after the event
  const char* (*query)(int device, void* event, int* reached);
  // After what the stream has so far, and not at all once the device has failed. The function may not use this table.
  const char* (*call)(int device, void* stream, void (*function)(void*), void* argument);
  // Host memory that copies reach without a detour.
  const char* (*pin)(int device, void* begin, size_t bytes);
  const char* (*unpin)(int device, void* begin);
  // Between memory of the device, memory of another one and the host's, which must be pinned.
  const char* (*copy)(int device, void* stream, void* to, const void* from, size_t bytes);
  // Between memory of the device, in one launch where that is quicker. Nothing that is written is also read, or written
  // twice.
  const char* (*copy_all)(int device, void* stream, const CudaCopy* copies, size_t count);
  // Memory of the device, for what the stream is given between these two calls and what is ordered between that.
  const char* (*allocate)(int device, void* stream, size_t bytes, void** memory);
  const char* (*release)(int device, void* stream, void* memory);
  // to[i] = factor * from[i], with the bits of device.h's reduce(); dtype: a DType. `to` may be `from`.
  const char* (*scale)(int device, void* stream, int dtype, void* to, const void* from, size_t count, double factor);
  // Calls the function at once, with the device as the thread's current one.
  const char* (*on_device)(int device, void (*function)(void*), void* argument);
  const char* (*bus_id)(int device, char* id, size_t bytes);  // of the GPU in its host, zero-terminated
  // Makes scale() ready, and copy_all() quick: compiles and loads what they run. create_stream() does it too, and works
  // where there is none.
  const char* (*load_kernels)(int device);
};

// The table; opened at the first call, which waits for it. Throws Error{invalid_argument} that says why there is none.
// library: "" for CUDA's driver; else the path of a library whose lightcc_cuda_functions() returns another table.
const CudaFunctions& cuda(const std::string& library);
const CudaFunctions& driver_functions();  // the one by CUDA's driver, whether there is one or not
void set_cuda(const CudaFunctions*);  // for tests: what cuda() returns from now on; nullptr: it opens the library again

// Where compiled kernels are kept from now on; "": nowhere. (device/cuda/kernels.cc)
void set_kernel_cache(const std::string& folder);

// Throws Error{internal} that begins with what was attempted.
void check_cuda(const char* failure, const char* attempted, int device);

}  // namespace lightcc
