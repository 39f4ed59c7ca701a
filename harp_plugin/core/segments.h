// How a message is cut: segments of one full payload, the last as long as it comes out; no bytes are one segment.
#pragma once
#include <algorithm>
#include <cstdint>

namespace harp {

struct Segments {
  uint32_t bytes, payload;
  uint32_t count() const { return bytes == 0 ? 1 : (bytes - 1) / payload + 1; }
  uint64_t offset(uint32_t segment) const { return uint64_t(segment) * payload; }
  uint32_t length(uint32_t segment) const { return uint32_t(std::min<uint64_t>(payload, bytes - offset(segment))); }
};

}  // namespace harp
