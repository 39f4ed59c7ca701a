// Packets as UDP datagrams past the kernel's stack: AF_XDP sockets, one for each queue of an interface. UDP sockets
// beside them hold the ports, and carry what only the kernel can: packets to this host itself, and to addresses whose
// Ethernet address it does not know yet. What is not to these ports stays the kernel's. It takes a driver with
// XDP, and either harpd or CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF.
#pragma once
#include <memory>
#include <string>

#include "harp_plugin/port/port.h"
#include "harp_plugin/port/udp.h"
#include "harp_plugin/port/xsk.h"

namespace harp {

struct XdpOptions {
  UdpOptions udp;       // address, ports and sizes are those of its sockets
  XskCopies copies = XskCopies::if_needed;
  uint32_t queues = 0;  // at most; 0: all that are free
  std::string harpd = {};       // where it listens (daemon/daemon.h); "": by the process's own privileges
  bool survives_harpd = false;  // when harpd ends, the kernel carries all packets; else all connections end
};

// What went which way; one thread.
struct XdpCounters {
  uint64_t sent = 0, received = 0;                       // by AF_XDP
  uint64_t sent_by_kernel = 0, received_by_kernel = 0;
  uint64_t refused = 0;  // no room now
  uint64_t dropped = 0;  // too short, too long, or not what its headers say
};

class XdpPort : public Port {
 public:
  virtual const XdpCounters& counters() const = 0;
};

// Throws Error{invalid_argument} or {internal}.
std::unique_ptr<XdpPort> open_xdp(const XdpOptions&);

}  // namespace harp
