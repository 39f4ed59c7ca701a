// Memory of a GPU for outputs, allocated in the order of a stream, where they lie until the program takes them. Any
// thread may hold and drop an output.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda_objects.h"
#include "engine/request/request.h"

namespace lightcc {

// A stream and what is allocated on it. What is given back, by any thread, goes back to the stream when its owner calls
// release(): while NCCL starts a collective, the stream may be given nothing else.
class GpuMemory {
 public:
  GpuMemory(const CudaFunctions& cuda, int device) : cuda_(cuda), device_(device), stream_(cuda, device) {}
  ~GpuMemory() { release(); }

  int device() const { return device_; }
  void* stream() const { return stream_.get(); }
  void* allocate(size_t bytes);
  // last_use: of another stream; nullptr: there was none.
  void give_back(void* memory, std::shared_ptr<CudaEvent> last_use);
  void release();  // all that was given back

 private:
  struct Returned {
    void* memory;
    std::shared_ptr<CudaEvent> last_use;
  };
  const CudaFunctions& cuda_;
  const int device_;
  const CudaStream stream_;
  std::mutex mutex_;
  std::vector<Returned> returned_;
};

// An output of so many bytes, which may outlive everything but the table. The streams that it is copied to must be
// behind what has written it.
std::shared_ptr<GpuOutput> gpu_output(const CudaFunctions&, std::shared_ptr<GpuMemory>, size_t bytes, void** memory);

}  // namespace lightcc
