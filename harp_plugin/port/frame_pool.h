// Frames for payloads that have to be copied, last given back first taken: the warm ones are used again.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace harp {

class FramePool {
 public:
  FramePool(uint32_t frames, uint32_t frame_bytes) : frame_bytes_(frame_bytes) {
    for (uint32_t i = frames; i > 0; --i) free_.push_back(i - 1);
  }
  // For a user that holds `held` already. A user may hold as many as are left: so one that gives nothing back
  // cannot starve the others (dynamic thresholds, Choudhury and Hahne 1998).
  std::optional<uint32_t> take(size_t held) {
    if (held >= free_.size()) return {};
    const uint32_t frame = free_.back();
    free_.pop_back();
    return frame;
  }
  void give_back(uint32_t frame) { free_.push_back(frame); }
  size_t offset(uint32_t frame) const { return size_t{frame} * frame_bytes_; }

 private:
  uint32_t frame_bytes_;
  std::vector<uint32_t> free_;
};

}  // namespace harp
