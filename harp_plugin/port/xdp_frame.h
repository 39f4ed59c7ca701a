// A packet as it stands on an Ethernet: the headers of Ethernet, IPv4 and UDP, then HARP's.
#pragma once
#include <netinet/in.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "harp_plugin/core/packet.h"
#include "harp_plugin/port/neighbors.h"

namespace harp {

inline constexpr size_t kEthernetBytes = 14, kIpBytes = 20, kUdpBytes = 8;
inline constexpr size_t kFrameHeaders = kEthernetBytes + kIpBytes + kUdpBytes;

// Where fields begin.
inline constexpr size_t kAtEthernetType = 12, kAtIpVersion = 14, kAtIpLength = 16, kAtIpFragment = 20, kAtIpTtl = 22,
                        kAtIpProtocol = 23, kAtIpChecksum = 24, kAtIpFrom = 26, kAtIpTo = 30, kAtUdpFrom = 34,
                        kAtUdpTo = 36, kAtUdpLength = 38;
inline constexpr uint8_t kIpWithoutOptions = 0x45;
inline constexpr uint16_t kEthernetIp = 0x0800, kDoNotFragment = 0x4000, kIsFragment = 0x3fff;  // in host order

inline sockaddr_in ip_of(const Address& address) {
  sockaddr_in ip{};
  std::memcpy(&ip, address.bytes.data(), sizeof ip);
  return ip;
}

// The headers of all packets from one host to one address.
class FrameHeaders {
 public:
  FrameHeaders(const EthernetAddress& from, const EthernetAddress& to, uint32_t from_ip, const sockaddr_in& peer) {
    std::memcpy(&bytes_[0], to.data(), to.size());
    std::memcpy(&bytes_[to.size()], from.data(), from.size());
    put(kAtEthernetType, htons(kEthernetIp));
    bytes_[kAtIpVersion] = kIpWithoutOptions;
    put(kAtIpFragment, htons(kDoNotFragment));
    bytes_[kAtIpTtl] = 64;
    bytes_[kAtIpProtocol] = IPPROTO_UDP;
    std::memcpy(&bytes_[kAtIpFrom], &from_ip, sizeof from_ip);
    std::memcpy(&bytes_[kAtIpTo], &peer.sin_addr, sizeof peer.sin_addr);
    put(kAtUdpTo, peer.sin_port);
    for (size_t at = kEthernetBytes; at < kEthernetBytes + kIpBytes; at += 2) sum_ += get(at);
  }

  // The headers of a packet from this UDP port, in network order. The UDP checksum is 0 (none), which IPv4 allows.
  std::array<uint8_t, kFrameHeaders> with(uint16_t port, size_t bytes) const {
    FrameHeaders one = *this;
    const uint16_t ip_length = htons(static_cast<uint16_t>(kIpBytes + kUdpBytes + bytes));
    uint32_t sum = sum_ + ip_length;
    sum = (sum & 0xffff) + (sum >> 16);
    sum += sum >> 16;
    one.put(kAtIpLength, ip_length);
    one.put(kAtIpChecksum, static_cast<uint16_t>(~sum));
    one.put(kAtUdpFrom, port);
    one.put(kAtUdpLength, htons(static_cast<uint16_t>(kUdpBytes + bytes)));
    return one.bytes_;
  }

 private:
  uint16_t get(size_t at) const {
    uint16_t value;
    std::memcpy(&value, &bytes_[at], sizeof value);
    return value;
  }
  void put(size_t at, uint16_t value) { std::memcpy(&bytes_[at], &value, sizeof value); }

  std::array<uint8_t, kFrameHeaders> bytes_{};
  uint32_t sum_ = 0;  // of the IP header's 16-bit words, without the length
};

// A frame that the filter has let through (xdp_filter.h), as a packet to one of these addresses. Nothing: it is to none
// of them, or shorter than its headers say.
inline std::optional<RxPacket> read_frame(std::span<const uint8_t> frame, std::span<const sockaddr_in> own) {
  if (frame.size() < kFrameHeaders + kHeaderBytes) return {};
  const auto field = [&](auto value, size_t at) {
    std::memcpy(&value, frame.data() + at, sizeof value);
    return value;
  };
  const size_t udp_bytes = ntohs(field(uint16_t{}, kAtUdpLength));
  if (udp_bytes < kUdpBytes + kHeaderBytes || udp_bytes > frame.size() - kEthernetBytes - kIpBytes) return {};
  RxPacket packet;
  while (packet.local < own.size() && own[packet.local].sin_port != field(uint16_t{}, kAtUdpTo)) ++packet.local;
  if (packet.local == own.size() || own[packet.local].sin_addr.s_addr != field(uint32_t{}, kAtIpTo)) return {};
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_port = field(uint16_t{}, kAtUdpFrom);
  from.sin_addr.s_addr = field(uint32_t{}, kAtIpFrom);
  std::memcpy(packet.from.bytes.data(), &from, sizeof from);
  packet.from.size = sizeof from;
  packet.head = frame.data() + kFrameHeaders;
  packet.head_bytes = kHeaderBytes;
  packet.payload = packet.head + kHeaderBytes;
  packet.payload_bytes = static_cast<uint32_t>(udp_bytes - kUdpBytes - kHeaderBytes);
  return packet;
}

}  // namespace harp
