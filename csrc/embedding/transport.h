// How bytes travel between the ranks of a group: an alltoall of segments that ends later. The real one is lightcc's
// (lightcc_transport.cc); tests bring one whose ranks are a loop.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lightcc::embedding {

// Memory that is not cleared and kept for the next message.
class Buffer {
 public:
  std::byte* reserve(size_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();
      memory_.reset(new std::byte[bytes + bytes / 4]);
      capacity_ = bytes + bytes / 4;
    }
    return memory_.get();
  }
  std::byte* data() const { return memory_.get(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
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
