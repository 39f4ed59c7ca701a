// The XDP program of an interface: it takes UDP packets to admitted ports to AF_XDP sockets and leaves everything else
// to the kernel. It is attached by a descriptor, so that nothing of it outlives this process.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/fd.h"
#include "harp_plugin/port/not_inherited.h"

namespace harp {

class XdpFilter {
 public:
  // Throws Error{internal} that says what is missing: a privilege, the driver's support, or the place, where another
  // program is attached already.
  explicit XdpFilter(const std::string& interface);
  ~XdpFilter();
  XdpFilter(const XdpFilter&) = delete;

  // Packets to this IPv4 address and UDP port, in network order, that come by this queue go to this socket, until it is
  // closed. It must be bound to the queue: others would be lost.
  void admit(uint32_t address, uint16_t port, uint32_t queue, int socket);
  void forget(uint32_t address, uint16_t port, uint32_t queue);

 private:
  lightcc::Fd admitted_, sockets_, program_, link_;
  std::vector<NotInherited> not_inherited_;
  std::vector<uint32_t> free_;  // slots of sockets_
};

}  // namespace harp
