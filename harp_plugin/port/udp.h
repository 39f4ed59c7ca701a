// Packets as UDP datagrams over the kernel: no privileges, any NIC. One socket for each own address (a path's source
// port). Sending: consecutive packets to one place are one datagram to the kernel's stack until the wire (UDP_SEGMENT,
// udp_sender.h). Receiving: payloads go straight to where they are expected to belong (udp_receiver.h).
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "harp_plugin/port/port.h"

namespace harp {

struct UdpOptions {
  std::string address;  // numeric IPv4 of this host to bind
  int locals = 1;       // sockets
  uint16_t first_port = 0, last_port = 0;  // that may be bound; 0: any
  bool keeps_port = false;  // the port cannot be given up while anybody holds the socket, as harpd asks
  uint32_t mtu = 0;     // 0: that of the interface which has the address
  bool tags = false;    // packets carry tags: a full one has room for it, and payloads are not placed
  std::optional<uint16_t> cookie = {};  // of such packets: what has another one is dropped by the kernel
  bool gso = true, gro = true;
};

// What the sockets did; one thread.
struct UdpCounters {
  uint64_t sent_calls = 0, sent_groups = 0;  // groups: packets that went as one datagram to the kernel's stack
  uint64_t refused = 0, unsent = 0;          // refused: no room now; unsent: no such address, link down, too large
  uint64_t received_calls = 0, aggregates = 0;
  uint64_t placed = 0, misplaced = 0;  // payloads that were, or were not, where they had been expected
  uint64_t dropped = 0;                // too short or too long for a packet
  bool gso = false;                    // groups are sent (still)
};

class UdpPort : public Port {
 public:
  virtual const UdpCounters& counters() const = 0;
  virtual int socket(int local) const = 0;
};

// Throws Error{invalid_argument} or what errno says.
std::unique_ptr<UdpPort> open_udp(const UdpOptions&);

}  // namespace harp
