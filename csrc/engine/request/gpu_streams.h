// What happens to requests of GPUs in the thread that submits them, on their streams. Any thread may call it.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/error.h"
#include "device/cuda_objects.h"
#include "engine/request/request.h"

namespace lightcc {

// A device has failed in the thread of a caller, and so in the program, which nobody else can go on without.
struct DeviceFailed : Error {
  using Error::Error;
};

// What the request's stream is given from now on runs after the outputs are written. Nothing happens for a request of
// the CPU or for which nothing was queued, nor at another call.
void order_own_stream(const Request&);

class GpuStreams {
 public:
  // compresses: on GPUs that can (LIGHTCC_GPU_COMPRESSION).
  GpuStreams(const std::string& cuda_library, bool compresses, int rank)
      : cuda_library_(cuda_library), compresses_(compresses), rank_(rank) {}

  // How far a stream has been filled: the mark of the previous request of the same call, during which the program gives
  // the stream nothing else.
  struct Mark {
    DevicePlace place;
    std::shared_ptr<CudaEvent> event;
  };
  // Notes it for a request, if it is one of a GPU. Throws Error{invalid_argument} if there is no such GPU, or its
  // stream cannot take part.
  void note(Request&, Mark* last);
  void fill(std::span<const Fill>);  // Engine::fill()

 private:
  const CudaFunctions& functions_for(const Request&);
  bool has_codec(const Request&);

  const std::string& cuda_library_;
  const bool compresses_;
  const int rank_;
  std::mutex mutex_;
  std::map<int, bool> codecs_;       // by device, whether its kernels of codecs were loaded
  std::atomic<int> gpus_{-1};        // in this process; -1: nobody has asked
};

}  // namespace lightcc
