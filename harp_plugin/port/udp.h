// Packets as UDP datagrams over the kernel: no privileges, any NIC. One socket for each own address (a path's source
// port). Sending: consecutive packets to one place are one system call and one datagram to the kernel's stack
// (UDP_SEGMENT). Receiving, one of two ways, whichever the network asks for (udp_receiver.h).
#pragma once
#include <memory>
#include <string>

#include "harp_plugin/port/port.h"

namespace harp {

struct UdpOptions {
  std::string address;  // numeric IPv4 of this host to bind
  int locals = 1;       // sockets
  uint32_t mtu = 0;     // 0: that of the interface which has the address
  bool tags = false;    // leave room for a tag in a full packet
  bool gso = true, gro = true;
};

// What the sockets did; one thread.
struct UdpCounters {
  uint64_t sent_calls = 0, refused = 0, unsent = 0;  // unsent: no such address, link down, too large
  uint64_t received_calls = 0, placed = 0, misplaced = 0, aggregates = 0, dropped = 0;
};

class UdpPort : public Port {
 public:
  virtual const UdpCounters& counters() const = 0;
};

// Throws Error{invalid_argument} or what errno says.
std::unique_ptr<UdpPort> open_udp(const UdpOptions&);

}  // namespace harp
