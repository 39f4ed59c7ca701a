#include "harp_plugin/port/udp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/epoll.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "harp_plugin/port/interfaces.h"
#include "harp_plugin/port/udp_receiver.h"

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

namespace harp {

namespace {

constexpr size_t kUdpHeaders = 28;       // IPv4 and UDP
constexpr size_t kLargestDatagram = 65507;
constexpr size_t kMostSegments = 64;     // of one UDP_SEGMENT call, in every kernel
constexpr size_t kTxBatch = 64;          // packets, and datagrams, of one sendmmsg
constexpr int kSocketBuffer = 4 << 20;   // asked for; the kernel grants its own limit to who has no privileges

sockaddr_in to_sockaddr(const std::string& address) {
  sockaddr_in ip{};
  ip.sin_family = AF_INET;
  if (inet_pton(AF_INET, address.c_str(), &ip.sin_addr) != 1)
    throw lightcc::Error(lightcc::Code::invalid_argument, "HARP: '" + address + "' is no IPv4 address");
  return ip;
}

class Udp : public UdpPort {
 public:
  explicit Udp(const UdpOptions& options) : gso_(options.gso), bell_(epoll_create1(EPOLL_CLOEXEC)) {
    const Interface interface = choose_interface(options.address);
    const size_t mtu = std::min<size_t>(options.mtu ? options.mtu : interface.mtu, kLargestDatagram + kUdpHeaders);
    const size_t around = kUdpHeaders + kHeaderBytes + (options.tags ? kTagBytes : 0);
    if (mtu < around + kMostControlBytes)
      throw lightcc::Error(lightcc::Code::invalid_argument,
                           "HARP: an MTU of " + std::to_string(mtu) + " is too small, 576 is the least that works");
    if (!bell_) throw lightcc::system_error("HARP: making an epoll descriptor");
    caps_ = {.name = "udp",
             .payload = uint32_t((mtu - around) / kOffsetUnit * kOffsetUnit),
             .receive_packets = 0,
             .holds_payload = false,
             .zero_copy = false,
             .locals = options.locals,
             .speed_mbit = interface.speed_mbit,
             .address = {}};
    for (int i = 0; i < options.locals; ++i) add_socket(options, uint16_t(i));
  }

  const Caps& caps() const override { return caps_; }
  const UdpCounters& counters() const override { return counters_; }

  size_t tx(std::span<const TxPacket> packets) override {
    size_t taken = 0;
    while (taken < packets.size()) {
      const size_t count = send_some(packets.subspan(taken));
      if (count == 0) break;
      taken += count;
    }
    done_ += taken;
    return taken;
  }
  uint64_t tx_done() override { return done_; }

  size_t rx(std::span<RxPacket> packets, std::span<const Expected> expected) override {
    const uint64_t now = lightcc::now_ns();
    size_t count = receivers_[current_].receive(packets, expected, now);
    if (count > 0 || receivers_.size() == 1) return count;
    // Nothing there: the next of the others, one a call, so that an idle socket costs little.
    other_ = (other_ + 1) % receivers_.size();
    if (other_ == current_) other_ = (other_ + 1) % receivers_.size();
    count = receivers_[other_].receive(packets, expected, now);
    if (count > 0) std::swap(current_, other_);
    return count;
  }
  void release(std::span<const RxPacket> packets) override {
    for (const RxPacket& packet : packets) receivers_[packet.local].release(packet);
  }

  int descriptor() const override { return sockets_.size() == 1 ? sockets_[0].get() : bell_.get(); }
  bool arm() override {
    for (const UdpReceiver& receiver : receivers_)
      if (receiver.holds_more()) return false;
    pollfd one{.fd = descriptor(), .events = POLLIN, .revents = 0};
    return poll(&one, 1, 0) == 0;
  }
  void disarm() override {}

 private:
  void add_socket(const UdpOptions& options, uint16_t local) {
    lightcc::Fd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) throw lightcc::system_error("HARP: opening a UDP socket");
    const int whole = IP_PMTUDISC_DO;  // never in fragments
    setsockopt(fd.get(), IPPROTO_IP, IP_MTU_DISCOVER, &whole, sizeof whole);
    for (const auto& [forced, plain] : {std::pair{SO_RCVBUFFORCE, SO_RCVBUF}, std::pair{SO_SNDBUFFORCE, SO_SNDBUF}})
      if (setsockopt(fd.get(), SOL_SOCKET, forced, &kSocketBuffer, sizeof kSocketBuffer) != 0)
        setsockopt(fd.get(), SOL_SOCKET, plain, &kSocketBuffer, sizeof kSocketBuffer);
    sockaddr_in address = to_sockaddr(options.address);
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      throw lightcc::system_error("HARP: binding a UDP socket to " + options.address);
    socklen_t length = sizeof address;
    getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length);
    if (local == 0) {
      std::memcpy(caps_.address.bytes.data(), &address, sizeof address);
      caps_.address.size = sizeof address;
    }
    int granted = 0;
    length = sizeof granted;
    getsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &granted, &length);
    // What the kernel charges for a full packet: its buffer is the next power of two, and 768 bytes beside it.
    size_t charged = 2048;
    while (charged < caps_.payload + 320) charged *= 2;
    caps_.receive_packets = std::max<uint32_t>(8, uint32_t(size_t(granted) / (charged + 768)));
    epoll_event event{.events = EPOLLIN, .data = {}};
    if (epoll_ctl(bell_.get(), EPOLL_CTL_ADD, fd.get(), &event) != 0)
      throw lightcc::system_error("HARP: watching a UDP socket");
    receivers_.emplace_back(fd.get(), local, caps_.payload + (options.tags ? uint32_t(kTagBytes) : 0), options.gro,
                            counters_);
    sockets_.push_back(std::move(fd));
  }

  // One sendmmsg of one socket; how many packets it took. Consecutive packets of equal size to one place, the last of
  // which may be shorter, are one datagram to the kernel until the wire.
  size_t send_some(std::span<const TxPacket> packets) {
    const uint16_t local = packets[0].local;
    size_t piece = 0, datagrams = 0, at = 0;
    while (at < packets.size() && at < kTxBatch && packets[at].local == local) {
      const TxPacket& first = packets[at];
      const size_t segment = bytes_of(first);
      size_t count = 0, bytes = 0, last = segment;
      const size_t first_piece = piece;
      while (at + count < packets.size() && at + count < kTxBatch) {
        const TxPacket& packet = packets[at + count];
        const size_t more = bytes_of(packet);
        const bool fits = count == 0 || (gso_ && last == segment && more <= segment && packet.local == local &&
                                         *packet.to == *first.to && bytes + more <= kLargestDatagram &&
                                         count < kMostSegments);
        if (!fits) break;
        pieces_[piece++] = {const_cast<uint8_t*>(packet.head.data()), packet.head_bytes};
        if (packet.payload_bytes > 0) pieces_[piece++] = {const_cast<uint8_t*>(packet.payload), packet.payload_bytes};
        if (packet.tagged) pieces_[piece++] = {const_cast<uint8_t*>(packet.tag.data()), kTagBytes};
        bytes += more;
        last = more;
        ++count;
      }
      address_to(first, &messages_[datagrams].msg_hdr, &pieces_[first_piece], piece - first_piece);
      if (count > 1) cut_into(segment, datagrams);
      counts_[datagrams++] = count;
      at += count;
    }
    ++counters_.sent_calls;
    const int sent = sendmmsg(sockets_[local].get(), messages_.data(), unsigned(datagrams), MSG_DONTWAIT);
    if (sent < 0) return failed(errno);
    size_t taken = 0;
    for (int i = 0; i < sent; ++i) taken += counts_[size_t(i)];
    return taken;
  }

  // The first datagram was refused. What it has to do with the network is a loss; how many packets are gone.
  size_t failed(int error) {
    if (error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == ENOMEM || error == EINTR) {
      ++counters_.refused;
      return 0;
    }
    if (counts_[0] > 1 && (error == EIO || error == EINVAL || error == EOPNOTSUPP)) {
      gso_ = false;
      lightcc::log(lightcc::Level::warning, "HARP: this kernel or device cannot send with UDP_SEGMENT (" +
                                                std::string(std::strerror(error)) + "); each packet is sent alone");
      return 0;
    }
    counters_.unsent += counts_[0];
    return counts_[0];
  }

  static size_t bytes_of(const TxPacket& packet) {
    return packet.head_bytes + packet.payload_bytes + (packet.tagged ? kTagBytes : 0);
  }
  static void address_to(const TxPacket& packet, msghdr* message, iovec* pieces, size_t count) {
    *message = {.msg_name = const_cast<uint8_t*>(packet.to->bytes.data()),
                .msg_namelen = packet.to->size,
                .msg_iov = pieces,
                .msg_iovlen = count,
                .msg_control = nullptr,
                .msg_controllen = 0,
                .msg_flags = 0};
  }
  void cut_into(size_t segment, size_t datagram) {
    msghdr& message = messages_[datagram].msg_hdr;
    message.msg_control = controls_[datagram].data();
    message.msg_controllen = CMSG_SPACE(sizeof(uint16_t));
    cmsghdr* control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_UDP;
    control->cmsg_type = UDP_SEGMENT;
    control->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    const auto value = uint16_t(segment);
    std::memcpy(CMSG_DATA(control), &value, sizeof value);
  }

  Caps caps_;
  UdpCounters counters_;
  bool gso_;
  const lightcc::Fd bell_;
  std::vector<lightcc::Fd> sockets_;
  std::vector<UdpReceiver> receivers_;
  size_t current_ = 0, other_ = 0;
  uint64_t done_ = 0;

  std::array<mmsghdr, kTxBatch> messages_;
  std::array<iovec, 3 * kTxBatch> pieces_;
  std::array<size_t, kTxBatch> counts_;
  struct alignas(cmsghdr) Control : std::array<uint8_t, 64> {};
  std::array<Control, kTxBatch> controls_;
};

}  // namespace

std::unique_ptr<UdpPort> open_udp(const UdpOptions& options) { return std::make_unique<Udp>(options); }

}  // namespace harp
