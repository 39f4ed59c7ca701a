#include "engine/run/nccl_stream.h"

#include <utility>

#include "base/error.h"

namespace lightcc {
namespace {

constexpr size_t kMostBatches = 32;  // that are queued and have not run
constexpr const char* kCopying = "copying tensors that run together";

}  // namespace

NcclStream::~NcclStream() {
  std::shared_ptr<CudaEvent> last_use;
  try {
    if (other_) last_use = std::make_shared<CudaEvent>(cuda_, device_);
    if (other_) last_use->record(other_->stream());
  } catch (const Error&) {
    // The GPU has failed, and all of its memory with it.
  }
  memory_->give_back(buffer_, std::move(last_use));
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
  return gpu_output(cuda_, memory_, bytes, memory);
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
  }
  request.delivered = end_;
}

}  // namespace lightcc
