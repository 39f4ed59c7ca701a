#include "harp_plugin/port/udp_sender.h"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

namespace harp {

namespace {

constexpr size_t kLargestSent = 65507;
constexpr size_t kMostSegments = 64;  // of one UDP_SEGMENT call, in every kernel

size_t bytes_of(const TxPacket& packet) {
  return packet.head_bytes + packet.payload_bytes + (packet.tagged ? kTagBytes : 0);
}

size_t gather(const TxPacket& packet, iovec* pieces) {
  size_t count = 0;
  pieces[count++] = {const_cast<uint8_t*>(packet.head.data()), packet.head_bytes};
  if (packet.payload_bytes > 0) pieces[count++] = {const_cast<uint8_t*>(packet.payload), packet.payload_bytes};
  if (packet.tagged) pieces[count++] = {const_cast<uint8_t*>(packet.tag.data()), kTagBytes};
  return count;
}

msghdr message_to(const Address& to, iovec* pieces, size_t count) {
  return {.msg_name = const_cast<uint8_t*>(to.bytes.data()),
          .msg_namelen = to.size,
          .msg_iov = pieces,
          .msg_iovlen = count,
          .msg_control = nullptr,
          .msg_controllen = 0,
          .msg_flags = 0};
}

bool is_reset(const TxPacket& packet) {
  const auto header = read_header({packet.head.data(), packet.head_bytes});
  return header && header->type == Type::reset;
}

// More than an eighth of the socket's buffer waits, perhaps for a host that does not answer ARP.
bool is_crowded(int socket) {
  int waiting = 0, room = 0;
  socklen_t length = sizeof room;
  return ioctl(socket, SIOCOUTQ, &waiting) == 0 && getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &room, &length) == 0 &&
         waiting > room / 8;
}

}  // namespace

uint32_t UdpSender::segments(size_t packet_bytes) {
  return static_cast<uint32_t>(std::clamp<size_t>(kLargestSent / packet_bytes, 1, kMostSegments));
}

UdpSender::UdpSender(bool gso, UdpCounters& counters) : counters_(counters) { counters_.gso = gso; }

size_t UdpSender::send(int socket, std::span<const TxPacket> packets) {
  // RESETs come last and go to anybody: they must not take the room of data.
  size_t resets = 0;
  while (resets < packets.size() && is_reset(packets[packets.size() - 1 - resets])) ++resets;
  if (resets == 0 || !is_crowded(socket)) return send_all(socket, packets);
  const size_t others = packets.size() - resets, taken = send_all(socket, packets.first(others));
  if (taken < others) return taken;
  counters_.unsent += resets;
  return packets.size();
}

size_t UdpSender::send_all(int socket, std::span<const TxPacket> packets) {
  size_t taken = 0;
  while (taken < packets.size()) {
    const size_t count = send_batch(socket, packets.subspan(taken));
    if (count == 0) break;
    taken += count;
  }
  return taken;
}

// Makes one datagram of packets of equal size to one place, the last of which may be shorter; how many pieces it has.
size_t UdpSender::group(std::span<const TxPacket> packets, size_t datagram, iovec* pieces) {
  const TxPacket& first = packets[0];
  const size_t segment = bytes_of(first);
  size_t count = 0, bytes = 0, last = segment, used = 0;
  do {
    used += gather(packets[count], pieces + used);
    last = bytes_of(packets[count]);
    bytes += last;
    ++count;
  } while (counters_.gso && count < std::min(packets.size(), kMostSegments) && last == segment &&
           bytes_of(packets[count]) <= segment && bytes + bytes_of(packets[count]) <= kLargestSent &&
           (packets[count].to == first.to || *packets[count].to == *first.to));
  counts_[datagram] = count;
  msghdr& message = messages_[datagram].msg_hdr;
  message = message_to(*first.to, pieces, used);
  if (count > 1) {
    message.msg_control = controls_[datagram].data();
    message.msg_controllen = controls_[datagram].size();
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_UDP;
    control->cmsg_type = UDP_SEGMENT;
    control->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    const auto value = static_cast<uint16_t>(segment);
    std::memcpy(CMSG_DATA(control), &value, sizeof value);
  }
  return used;
}

size_t UdpSender::send_batch(int socket, std::span<const TxPacket> packets) {
  packets = packets.first(std::min(packets.size(), kBatch));
  size_t datagrams = 0, pieces = 0;
  for (size_t at = 0; at < packets.size(); at += counts_[datagrams++])
    pieces += group(packets.subspan(at), datagrams, pieces_.data() + pieces);
  ++counters_.sent_calls;
  const int sent = sendmmsg(socket, messages_.data(), static_cast<unsigned>(datagrams), MSG_DONTWAIT);
  if (sent < 0) return failed(socket, packets[0], errno);
  size_t taken = 0;
  for (size_t i = 0; i < static_cast<size_t>(sent); ++i) {
    taken += counts_[i];
    counters_.sent_groups += counts_[i] > 1;
  }
  return taken;
}

// The first datagram was refused. What it has to do with the network is a loss; how many packets are done with.
size_t UdpSender::failed(int socket, const TxPacket& first, int error) {
  if (error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == ENOMEM || error == EINTR) {
    ++counters_.refused;
    return 0;
  }
  // Kernels before 6.11 want a device that makes checksums. It is not the address if a packet alone goes there.
  if (counts_[0] > 1 && (error == EIO || error == EINVAL || error == EOPNOTSUPP)) {
    const msghdr alone = message_to(*first.to, pieces_.data(), gather(first, pieces_.data()));
    if (sendmsg(socket, &alone, MSG_DONTWAIT) >= 0) {
      counters_.gso = false;
      lightcc::log(lightcc::Level::warning,
                   std::string("HARP: the kernel does not send several packets as one (UDP_SEGMENT: ") +
                       std::strerror(error) + "); each is sent alone");
      return 1;
    }
  }
  counters_.unsent += counts_[0];
  return counts_[0];
}

}  // namespace harp
