// Where the kernel would send packets to an address: over which interface, to which Ethernet address.
#pragma once
#include <netinet/in.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"

namespace harp {

using EthernetAddress = std::array<uint8_t, 6>;

class Neighbors {
 public:
  // Packets leave by this interface, from this address of it; IPv4 in network order.
  Neighbors(const std::string& interface, uint32_t from);
  const EthernetAddress& own() const { return own_; }  // as of the last find()

  // The address of the host itself, or of the router on the way to it. Nothing: the kernel does not know it (yet), or
  // sends such packets elsewhere, as within this host. An empty datagram, which HARP drops, makes it look and keep it.
  std::optional<EthernetAddress> find(const sockaddr_in&);

 private:
  std::optional<uint32_t> next_hop(uint32_t address);
  bool read_own();

  const std::string interface_;
  const uint32_t index_, from_;
  lightcc::Fd routes_, datagrams_;
  EthernetAddress own_;
};

}  // namespace harp
