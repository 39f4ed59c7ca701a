// How bytes travel between the ranks of a group: an alltoall of segments that ends later. The real one is lightcc's
// (lightcc_transport.cc); tests bring one whose ranks are a loop.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lightcc::embedding {

// Memory that is not cleared and kept for the next message. Rows of a lookup are in such memory, and TensorFlow copies
// what is not aligned so.
class Buffer {
 public:
  static constexpr std::align_val_t kAlignment{64};
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  std::byte* reserve(size_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();
      memory_.reset(new (kAlignment) std::byte[bytes + bytes / 4]);
      capacity_ = bytes + bytes / 4;
    }
    return memory_.get();
  }
  std::byte* data() const { return memory_.get(); }
  size_t capacity() const { return capacity_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(capacity_, other.capacity_);
  }
  struct Delete {
    void operator()(std::byte* memory) const { operator delete[](memory, kAlignment); }
  };
  std::unique_ptr<std::byte[], Delete> memory_;
  size_t capacity_ = 0;
};

struct OutgoingSegments {
  std::byte* data = nullptr;
  std::vector<int32_t> bytes;  // to each rank, one segment after the other
};

// A message under way. It owns what came until it is destroyed.
class PendingMessage {
 public:
  virtual ~PendingMessage() = default;
  virtual bool finish(int timeout_ms) = 0;  // true: it is done. Throws Error when it has failed
  std::span<const std::byte> from(int rank) const {
    size_t at = 0;
    for (int i = 0; i < rank; ++i) at += size_t(received[size_t(i)]);
    return {incoming.data() + at, size_t(received[size_t(rank)])};
  }
  Buffer incoming;
  std::vector<int32_t> received;
};

class Alltoalls {
 public:
  virtual ~Alltoalls() = default;
  // Memory for a message, which the transport may read until that is done.
  virtual std::byte* outgoing(size_t bytes) = 0;
  virtual void give_back(std::byte* outgoing) = 0;
  virtual std::unique_ptr<PendingMessage> alltoall(const std::string& name, const OutgoingSegments&) = 0;
};
std::unique_ptr<Alltoalls> lightcc_transport(int group, int size);

}  // namespace lightcc::embedding
