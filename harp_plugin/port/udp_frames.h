// Memory that datagrams are received into: frames of one size, last given back first taken, so that warm ones are used
// again. A frame is free again when each packet in it has been released. One thread.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace harp {

class UdpFrames {
 public:
  static constexpr size_t kAlignment = 64;

  // `touched`: the memory is there from the start, and no page fault delays a packet.
  UdpFrames(uint32_t count, size_t frame_bytes, bool touched)
      : stride_((frame_bytes + kAlignment - 1) / kAlignment * kAlignment),
        memory_(static_cast<uint8_t*>(::operator new[](count * stride_, std::align_val_t{kAlignment}))),
        references_(count) {
    if (touched) std::memset(memory_.get(), 0, count * stride_);
    free_.reserve(count);
    for (uint32_t i = count; i > 0; --i) free_.push_back(i - 1);
  }

  uint8_t* bytes(uint32_t frame) { return memory_.get() + frame * stride_; }
  size_t free() const { return free_.size(); }
  bool plenty() const { return free_.size() > references_.size() / 2; }

  // The one that the (i + 1)-th take() will give.
  uint32_t peek(size_t i) const { return free_[free_.size() - 1 - i]; }
  uint32_t take() {  // held once
    const uint32_t frame = free_.back();
    free_.pop_back();
    references_[frame] = 1;
    return frame;
  }
  void hold(uint32_t frame) { ++references_[frame]; }
  void release(uint32_t frame) {
    if (--references_[frame] == 0) free_.push_back(frame);
  }

 private:
  struct Delete {
    void operator()(uint8_t* memory) const { ::operator delete[](memory, std::align_val_t{kAlignment}); }
  };
  const size_t stride_;
  const std::unique_ptr<uint8_t[], Delete> memory_;
  std::vector<uint32_t> references_, free_;
};

}  // namespace harp
