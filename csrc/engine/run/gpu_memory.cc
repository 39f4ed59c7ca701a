#include "engine/run/gpu_memory.h"

#include <utility>

namespace lightcc {
namespace {

class OutputOnGpu : public GpuOutput {
 public:
  OutputOnGpu(const CudaFunctions& cuda, std::shared_ptr<GpuMemory> memory, size_t bytes)
      : cuda_(cuda), memory_(std::move(memory)), data_(memory_->allocate(bytes)) {}
  ~OutputOnGpu() override { memory_->give_back(data_, std::move(copied_)); }
  void* data() const { return data_; }

  // The tensor's stream is behind what has written it.
  void copy_to(const DevicePlace& place, void* tensor, const void* from, size_t bytes) override {
    if (const char* why = cuda_.refuse_stream(place.device, place.stream)) throw Error(Code::invalid_argument, why);
    std::lock_guard lock(mutex_);
    if (copied_) copied_->order(place.device, place.stream);
    auto copied = std::make_unique<CudaEvent>(cuda_, place.device);
    check_cuda(cuda_.copy(place.device, place.stream, tensor, from, bytes), "copying an output", place.device);
    copied->record(place.stream);
    copied_ = std::move(copied);
  }

 private:
  const CudaFunctions& cuda_;
  const std::shared_ptr<GpuMemory> memory_;
  void* const data_;
  std::mutex mutex_;
  std::unique_ptr<CudaEvent> copied_;  // all that was taken out so far
};

}  // namespace

void* GpuMemory::allocate(size_t bytes) {
  void* memory = nullptr;
  check_cuda(cuda_.allocate(device_, stream(), bytes, &memory), "allocating memory", device_);
  return memory;
}

void GpuMemory::give_back(void* memory, std::shared_ptr<CudaEvent> last_use) {
  std::lock_guard lock(mutex_);
  if (memory) returned_.push_back({memory, std::move(last_use)});
}

void GpuMemory::release() {
  std::lock_guard lock(mutex_);
  try {
    for (const Returned& one : returned_) {
      if (one.last_use) one.last_use->order(device_, stream());
      check_cuda(cuda_.release(device_, stream(), one.memory), "releasing memory", device_);
    }
  } catch (const Error&) {
    // The GPU has failed, and all of its memory with it.
  }
  returned_.clear();
}

std::shared_ptr<GpuOutput> gpu_output(const CudaFunctions& cuda, std::shared_ptr<GpuMemory> on, size_t bytes,
                                      void** memory) {
  auto output = std::make_shared<OutputOnGpu>(cuda, std::move(on), bytes);
  *memory = output->data();
  return output;
}

}  // namespace lightcc
