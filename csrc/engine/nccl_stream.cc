#include "engine/nccl_stream.h"

#include <algorithm>

namespace lightcc {
namespace {

constexpr size_t kMostBatches = 32;  // that are queued and have not run
constexpr const char* kCopying = "copying tensors that run together";

class NcclOutput : public GpuOutput {
 public:
  NcclOutput(const CudaFunctions& cuda, std::shared_ptr<NcclMemory> memory, size_t bytes)
      : cuda_(cuda), memory_(std::move(memory)), data_(memory_->allocate(bytes)) {}
  ~NcclOutput() override { memory_->give_back(data_, std::move(copied_)); }
  void* data() const { return data_; }

  // The tensor's stream is behind the collective already.
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
  const std::shared_ptr<NcclMemory> memory_;
  void* const data_;
  std::mutex mutex_;
  std::unique_ptr<CudaEvent> copied_;  // all that was taken out so far
};

}  // namespace

void* NcclMemory::allocate(size_t bytes) {
  void* memory = nullptr;
  check_cuda(cuda_.allocate(device_, stream(), bytes, &memory), "allocating memory", device_);
  return memory;
}

void NcclMemory::give_back(void* memory, std::unique_ptr<CudaEvent> last_use) {
  std::lock_guard lock(mutex_);
  if (memory) returned_.push_back({memory, std::move(last_use)});
}

void NcclMemory::release() {
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

void NcclStream::follow(const Request& request) {
  used_ = true;
  end_ = nullptr;
  memory_->release();
  if (request.ready == followed_) return;
  request.ready->order(device_, get());
  followed_ = request.ready;
}

std::byte* NcclStream::buffer(size_t bytes) {
  if (bytes > buffer_bytes_) {
    memory_->give_back(std::exchange(buffer_, nullptr), nullptr);
    buffer_bytes_ = 0;
    memory_->release();
    buffer_ = memory_->allocate(bytes + bytes / 2);
    buffer_bytes_ = bytes + bytes / 2;
  }
  return static_cast<std::byte*>(buffer_);
}

void NcclStream::copy(const CudaCopy& one) {
  check_cuda(cuda_.copy(device_, get(), one.to, one.from, one.bytes), kCopying, device_);
}

void NcclStream::copy_all(std::span<const CudaCopy> copies) {
  if (batches_copies_)
    check_cuda(cuda_.copy_all(device_, get(), copies.data(), copies.size()), kCopying, device_);
  else
    for (const CudaCopy& one : copies) copy(one);
}

std::shared_ptr<GpuOutput> NcclStream::output(size_t bytes, void** memory) {
  auto output = std::make_shared<NcclOutput>(cuda_, memory_, bytes);
  *memory = output->data();
  return output;
}

bool NcclStream::has_room() {
  while (!ends_.empty() && ends_.front()->reached()) ends_.pop_front();
  return ends_.size() < kMostBatches;
}

void NcclStream::finish(Request& request) {
  if (!end_) {
    end_ = std::make_shared<CudaEvent>(cuda_, device_);
    end_->record(get());
    ends_.push_back(end_);
    behind_.clear();
  }
  request.delivered = end_;
  const std::pair place{request.place.device, request.place.stream};
  if (std::ranges::find(behind_, place) != behind_.end()) return;
  end_->order(place.first, place.second);
  behind_.push_back(place);
}

}  // namespace lightcc
