// What one endpoint is told when it is made: plain data. The front end fills it from its arguments and the environment.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace harp {

inline constexpr uint64_t kMicrosecond = 1'000, kMillisecond = 1'000'000, kSecond = 1'000'000'000;
inline constexpr int kMostPaths = 8;  // of one connection

struct Options {
  uint32_t payload = 1440;               // bytes of a full packet: what the port carries, a multiple of kOffsetUnit
  uint32_t receive_packets = 128;        // that a peer may have on the way to this port before it loses some
  int paths = 1;                         // that this side opens, at most kMostPaths
  uint64_t peer_timeout_ns = 4 * kSecond;      // without a sign of life from it, a peer is dead
  uint64_t connect_timeout_ns = 60 * kSecond;
  uint64_t delay_target_ns = 100 * kMicrosecond;  // that packets wait on the way before the sender slows down
  uint64_t least_timeout_ns = kMillisecond;    // for a packet that is not acknowledged
  uint64_t ack_delay_ns = 50 * kMicrosecond;   // how long an acknowledgement waits for more to acknowledge,
  uint32_t ack_every = 16;                     // or for so many packets
  uint32_t eager_bytes = 8192;           // messages of at most this size need no grant,
  uint32_t eager_messages = 16;          // so many beyond those that are posted
  uint32_t stream_frames = 256;          // credit of a stream: records that the receiver holds unread, at most
  bool authenticate = false;             // every packet carries a tag (siphash.h) under a key derived from secret
  std::string secret = {};               // the same on both sides; used with authenticate only
  uint16_t cookie = 0;                   // the endpoint's own, made of the secret (packet.h)
  std::optional<uint64_t> first_number = {};  // of the packets it sends; by default random
};

}  // namespace harp
