// The sending half of the port udp. Nothing is copied before the kernel does: header, payload and tag are gathered.
#pragma once
#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <span>

#include "harp_plugin/port/udp.h"

namespace harp {

class UdpSender {
 public:
  static constexpr size_t kBatch = 96;  // packets, and datagrams, of one sendmmsg
  // Full packets, with headers and tag, that are sent as one.
  static uint32_t segments(size_t packet_bytes);

  UdpSender(bool gso, UdpCounters& counters);

  // Packets of one local that this socket has taken; what cannot be sent at all is taken and lost. Less than given: the
  // socket is full. RESETs are lost where more than an eighth of its buffer is used.
  size_t send(int socket, std::span<const TxPacket>);

 private:
  static constexpr size_t kMostPieces = 3;  // of a packet: header, payload, tag
  struct alignas(cmsghdr) Control : std::array<uint8_t, CMSG_SPACE(sizeof(uint16_t))> {};

  size_t send_all(int socket, std::span<const TxPacket>);
  size_t group(std::span<const TxPacket>, size_t datagram, iovec* pieces);
  size_t send_batch(int socket, std::span<const TxPacket>);
  size_t failed(int socket, const TxPacket& first, int error);

  UdpCounters& counters_;
  std::array<mmsghdr, kBatch> messages_;
  std::array<iovec, kMostPieces * kBatch> pieces_;
  std::array<size_t, kBatch> counts_;  // packets of each datagram
  std::array<Control, kBatch> controls_;
};

}  // namespace harp
