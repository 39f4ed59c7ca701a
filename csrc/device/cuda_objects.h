// Streams and events of CUDA as objects that give themselves back. Any thread may use them. What fails throws
// Error{internal}.
#pragma once
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/cuda.h"

namespace lightcc {

class CudaEvent {
 public:
  CudaEvent(const CudaFunctions& cuda, int device) : cuda_(cuda), device_(device) {
    check_cuda(cuda_.create_event(device_, &event_), "making an event", device_);
  }
  ~CudaEvent() { cuda_.destroy_event(device_, event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  // Stands from now on for what the stream has been given so far.
  void record(void* stream) { check_cuda(cuda_.record(device_, event_, stream), "recording an event", device_); }
  // What the stream, maybe of another device, is given from now on runs after the event.
  void order(int device, void* stream) const {
    check_cuda(cuda_.order(device, stream, event_), "ordering a stream", device);
  }
  // The same for a stream that is there since the event was recorded: only the first call for it does anything.
  void order_once(int device, void* stream) {
    std::lock_guard lock(mutex_);
    if (std::ranges::find(behind_, std::pair{device, stream}) != behind_.end()) return;
    order(device, stream);
    behind_.emplace_back(device, stream);
  }
  bool reached() const {
    int reached = 0;
    check_cuda(cuda_.query(device_, event_, &reached), "waiting for copies", device_);
    return reached != 0;
  }
  int device() const { return device_; }

 private:
  const CudaFunctions& cuda_;
  const int device_;
  void* event_ = nullptr;
  std::mutex mutex_;
  std::vector<std::pair<int, void*>> behind_;  // by order_once()
};

class CudaStream {
 public:
  CudaStream(const CudaFunctions& cuda, int device) : cuda_(cuda), device_(device) {
    check_cuda(cuda_.create_stream(device_, &stream_), "making a stream", device_);
  }
  ~CudaStream() { cuda_.destroy_stream(device_, stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  void* get() const { return stream_; }

 private:
  const CudaFunctions& cuda_;
  const int device_;
  void* stream_ = nullptr;
};

}  // namespace lightcc
