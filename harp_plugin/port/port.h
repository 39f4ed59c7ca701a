// What carries packets for one engine: a queue of a NIC, UDP sockets, rings in shared memory. One thread calls.
// A port may lose, repeat and reorder packets; it never blocks and never waits.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "harp_plugin/core/expected.h"

namespace harp {

struct Caps {
  std::string name;          // "udp", "shm", ...
  uint32_t payload;          // the largest payload of DATA with room for a tag, a multiple of kOffsetUnit
  uint32_t receive_packets;  // full ones that it holds unread before it loses some
  bool holds_payload;        // it reads payloads after tx() (tx_done() tells until when); else tx() has copied them
  bool places_payload;       // rx() makes use of `expected`
  bool zero_copy;            // no copy of a payload by a CPU between the sender's memory and RxPacket
  uint32_t sent_together = 1;  // full packets that tx() makes one of, if it gets so many
  int locals;                // own addresses: TxPacket::local and RxPacket::local are below it
  uint64_t speed_mbit;       // 0: not known
  Address address;           // of local 0: where peers open connections to
};

// How the thread of a port sleeps until packets come.
class Doorbell {
 public:
  virtual ~Doorbell() = default;
  virtual int descriptor() const = 0;  // for poll(); -1: none, look again within a millisecond
  virtual bool arm() = 0;              // the descriptor becomes readable when a packet comes; false: one is there
  virtual void disarm() = 0;           // after sleep, before the next rx()
};

class Port : public Doorbell {
 public:
  virtual const Caps& caps() const = 0;
  // Takes packets in order; how many. Fewer than given: try again later. A packet that cannot be sent at all (no such
  // address, link down) is taken and lost.
  virtual size_t tx(std::span<const TxPacket>) = 0;
  // How many of all packets that tx() has taken are no longer read by it: they are let go in order.
  virtual uint64_t tx_done() = 0;
  // Packets that have come. `expected` are probably the next ones, in order (expected.h says what is true of them).
  virtual size_t rx(std::span<RxPacket>, std::span<const Expected> expected) = 0;
  virtual void release(std::span<const RxPacket>) = 0;  // each packet once, in any order
  // What it has counted, by name.
  virtual std::vector<std::pair<const char*, uint64_t>> counted() const { return {}; }
};

}  // namespace harp
