// What two ranks say to each other of sends and receives, on the link that carries the data, too. A frame is one line;
// data of which it says that they come along follow in records of their own, unless they fit into it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "engine/run/tag_matching.h"

namespace lightcc {

// Of a tensor that is sent or received: what must be equal on both sides.
struct PeerTensor {
  DType dtype = DType::uint8;
  int64_t count = 0;                 // of elements
  bool operator==(const PeerTensor&) const = default;
  size_t bytes() const { return size_t(count) * size_of(dtype); }
};

struct PeerFrame {
  enum Type : uint16_t {
    sends,     // the next send under `tag`; all of its bytes come along, or none
    receives,  // the next receive under `tag`
    data,      // the next `bytes` of send `number` come along
    leaves     // the rank has left, and this is its last
  };
  static constexpr size_t kInlineBytes = 32;

  uint16_t type = sends;
  int16_t dtype = 0;
  MessageTag tag;
  uint32_t bytes = 0;                // that come along
  uint64_t number = 0;               // of a send, among those of its rank on this link
  int64_t count = 0;
  std::byte inlined[kInlineBytes] = {};

  PeerTensor tensor() const { return {DType(dtype), count}; }
};
static_assert(sizeof(PeerFrame) == kLine);

}  // namespace lightcc
