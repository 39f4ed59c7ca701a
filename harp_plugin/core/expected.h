// A guess at a packet that comes next, with the place of its payload: a port that can write there saves the copy.
//
// The endpoint owns the guesses: it makes them (Endpoint::expected()) and forgets them in its next call that changes
// anything. A port has them during one call of rx() alone.
//
// Invariants:
//   1. A place lies inside the posted buffer of a message that is not done, within the message's length, and belongs to
//      a segment that has not come. So a port may write anything into it: the segment itself comes later.
//   2. No two places of one call overlap: a packet that was scattered over them can be put together again.
//   3. They are segments of two messages at most, in the order in which they were first sent.
//   4. A port says that a payload is in its place (RxPacket::payload is Expected::at) only where matches() holds.
//      Nobody believes the packet for that: it is checked as any other, and only then counts as received.
//   5. With authentication, and for streams, there are none.
#pragma once
#include "harp_plugin/core/packet.h"

namespace harp {

inline constexpr size_t kMostExpected = 96;

struct Expected {
  uint32_t conn;
  uint16_t message;
  uint32_t offset;  // in units of kOffsetUnit
  uint32_t total;
  uint8_t* at;
  uint32_t bytes;

  // Whether a packet with this header, of kHeaderBytes, and as many bytes of payload is the one.
  bool matches(const uint8_t* head, size_t payload_bytes) const {
    const std::optional<Header> header = read_header({head, kHeaderBytes});
    return payload_bytes == bytes && header && header->type == Type::data && (header->flags & ~kNextAlike) == 0 &&
           header->conn == conn && header->message == message && header->offset == offset && header->total == total;
  }
};

}  // namespace harp
