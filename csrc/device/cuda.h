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

// A piece that a codec makes a message of: acc = residual + scale * gradient (device/topk.h, device/quantization.h).
// All memory is the device's, and the caller's until the stream has done it.
struct CudaEncode {
  const void* gradient;  // `count` elements of `dtype`: float32, float16 or bfloat16; is read only
  // One of each pair holds what earlier steps have left behind, the other what this step leaves; the state says which.
  float* residual[2];
  float* velocity[2];  // Top-K with momentum correction (piece_codec.h); else nullptr
  void* state;         // kCodecStateBytes, all 0 at first; of the piece, from step to step
  void* body;          // the message; at any address
  size_t count, k;     // Top-K: 1 to count
  float scale, momentum;
  int dtype;
  int half;  // Top-K: values are sent as float16
};
constexpr size_t kCodecStateBytes = 16;  // its first four say which of a pair holds what is left behind: 0 or 1

// A piece whose messages become a dense sum: out[i] = scale * (the messages' values, in the order of the nodes).
struct CudaDecode {
  const void* bodies;  // of node 0, at any address; of the next ones `stride` bytes on each
  size_t stride;
  void* out;  // `count` elements of `dtype`
  size_t count, k;
  unsigned nodes;
  double scale;
  int dtype;
  int half;
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
  // Queues that pieces become messages, or messages sums, with the bits of the CPU's codecs. codec: a CodecKind. Pieces
  // of no element are left out. error: 8 bytes of the device; a message that the CPU's codec would refuse writes there
  // 1 + the piece's place among the others + 2^32 * the node, if 0 is there; then the sums of that piece are any.
  const char* (*encode)(int device, void* stream, int codec, const CudaEncode* pieces, size_t count);
  const char* (*decode)(int device, void* stream, int codec, const CudaDecode* pieces, size_t count, uint64_t* error);
  // Makes these two ready, which others need not wait for.
  const char* (*load_codecs)(int device);
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
