// One connection: reliability, flow control and congestion control between two endpoints. No I/O and no clock: packets
// come in through receive(), go out through transmit(), and time is a parameter that never goes back.
//
// Invariants:
//   1. A packet number is used once. What is sent again is sent under a new number.
//   2. A byte is written into a posted buffer only if the packet passed every check of receive(), and at most once.
//   3. A request is completed exactly once: by success, or by the failure of its connection.
//   4. Bytes of a message travel only within what the peer has granted: posted buffers, or its eager pool.
//   5. Where the peer has said nothing for Options::peer_timeout_ns although it was asked, the connection has failed.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "harp_plugin/core/options.h"
#include "harp_plugin/core/packet.h"

namespace harp {

using ConnectionId = uint32_t;  // what the peer's packets carry; 0 is none
inline constexpr uint32_t kMostRequests = 256;  // of a connection that wait, each way

enum class Status : int {
  ok = 0,
  pending = 1,
  invalid_argument = 2,
  too_long = 3,       // the message is longer than the buffer posted for it; the connection goes on
  peer_closed = 4,    // it closed the connection, in order
  peer_failed = 5,    // it closed and gave up what was under way, or does not know the connection (any more)
  peer_silent = 6,    // no sign of life for the peer's time-out
  cancelled = 7,      // this side closed before it was done
  connect_timeout = 8,
  local_fault = 9,    // the port or the system
};
const char* name_of(Status);

struct Completion {
  uint64_t request = 0;  // as given to send() or receive()
  Status status = Status::ok;
  uint64_t bytes = 0;    // sent, or received
};

// What a connection counts; the stats page shows these.
struct Counters {
  uint64_t packets_sent = 0, packets_received = 0, bytes_sent = 0, bytes_received = 0;  // payload of DATA
  uint64_t messages_sent = 0, messages_received = 0;
  uint64_t retransmitted = 0, lost = 0, spurious = 0, timeouts = 0;
  uint64_t duplicates = 0, malformed = 0, unauthenticated = 0, out_of_window = 0, out_of_buffer = 0;
  uint64_t acks_sent = 0, acks_received = 0, placed = 0 /* payloads that the port put in their place */;
  uint64_t window_packets = 0, srtt_ns = 0, least_rtt_ns = 0;  // now
};

enum class State : uint8_t { opening, open, closing, closed };

// A record of a stream, lent until it is consumed.
struct Record {
  const uint8_t* data = nullptr;
  uint32_t bytes = 0;
};

}  // namespace harp
