#include "harp_plugin/port/udp.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>

#include <cstring>
#include <vector>

#include "base/fd.h"
#include "harp_plugin/port/interfaces.h"
#include "harp_plugin/port/not_inherited.h"
#include "harp_plugin/port/udp_receiver.h"
#include "harp_plugin/port/udp_sender.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr size_t kUdpHeaders = 28;      // IPv4 and UDP
constexpr size_t kLargestMtu = 65535;   // of IPv4
constexpr int kSocketBuffer = 4 << 20;  // asked for; the kernel grants its own limit to unprivileged processes
constexpr uint32_t kRoundsPerLook = 16;
constexpr int kPortAttempts = 16;  // others may take one meanwhile

sockaddr_in to_sockaddr(const std::string& address) {
  sockaddr_in ip{};
  ip.sin_family = AF_INET;
  if (inet_pton(AF_INET, address.c_str(), &ip.sin_addr) != 1)
    throw Error(Code::invalid_argument, "HARP: '" + address + "' is no IPv4 address");
  return ip;
}

// A port that was free just now. One that the kernel chooses for a socket can be given up by it (connecting to
// AF_UNSPEC), one that it was bound to by its number cannot.
uint16_t free_port(sockaddr_in ip) {
  const Fd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  socklen_t length = sizeof ip;
  auto* const name = reinterpret_cast<sockaddr*>(&ip);
  return fd && bind(fd.get(), name, length) == 0 && getsockname(fd.get(), name, &length) == 0 ? ntohs(ip.sin_port) : 0;
}

// To the first port that is free.
void bind_socket(const Fd& fd, const UdpOptions& options) {
  sockaddr_in ip = to_sockaddr(options.address);
  for (int attempt = 0; options.keeps_port && options.first_port == 0 && attempt < kPortAttempts; ++attempt) {
    ip.sin_port = 0;
    ip.sin_port = htons(free_port(ip));
    if (ip.sin_port != 0 && bind(fd.get(), reinterpret_cast<const sockaddr*>(&ip), sizeof ip) == 0) return;
  }
  for (uint32_t port = options.first_port;; ++port) {
    ip.sin_port = htons(static_cast<uint16_t>(port));
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&ip), sizeof ip) == 0) return;
    if (errno != EADDRINUSE || port >= options.last_port) break;
  }
  const std::string ports = options.first_port ? ", ports " + std::to_string(options.first_port) + " to " +
                                                     std::to_string(options.last_port)
                                               : "";
  throw lightcc::system_error("HARP: binding a UDP socket to " + options.address + ports);
}

// Lets pass what is long enough for a packet with a tag, and has the flag and the cookie. Loads are big-endian, and
// from the UDP header on.
void drop_strangers(const Fd& fd, uint16_t cookie) {
  constexpr uint32_t kUdp = 8, kFlags = kUdp + 1, kPath = kUdp + 20;
  constexpr auto kSwapped = [](uint16_t value) { return uint32_t{value} % 256 << 8 | uint32_t{value} / 256; };
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kUdp + kHeaderBytes + kTagBytes, 0, 6),
      BPF_STMT(BPF_LD | BPF_B | BPF_ABS, kFlags),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kTagged, 0, 4),
      BPF_STMT(BPF_LD | BPF_H | BPF_ABS, kPath),
      BPF_STMT(BPF_ALU | BPF_AND | BPF_K, kSwapped(uint16_t(~kPathNumber))),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kSwapped(cookie), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, UINT32_MAX),
      BPF_STMT(BPF_RET | BPF_K, 0),
  };
  const sock_fprog filter{std::size(program), program};
  if (setsockopt(fd.get(), SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) != 0)
    throw lightcc::system_error("HARP: having the kernel drop packets without the cookie");
}

Fd open_socket(const UdpOptions& options) {
  Fd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw lightcc::system_error("HARP: opening a UDP socket");
  // Never in fragments, and no ICMP message, which anyone may send, changes the size: what is too large is lost.
  const int whole = IP_PMTUDISC_PROBE;
  if (setsockopt(fd.get(), IPPROTO_IP, IP_MTU_DISCOVER, &whole, sizeof whole) != 0)
    throw lightcc::system_error("HARP: forbidding fragments of UDP datagrams");
  for (const auto& [forced, plain] : {std::pair{SO_RCVBUFFORCE, SO_RCVBUF}, std::pair{SO_SNDBUFFORCE, SO_SNDBUF}})
    if (setsockopt(fd.get(), SOL_SOCKET, forced, &kSocketBuffer, sizeof kSocketBuffer) != 0)
      setsockopt(fd.get(), SOL_SOCKET, plain, &kSocketBuffer, sizeof kSocketBuffer);
  if (options.cookie) drop_strangers(fd, *options.cookie);
  bind_socket(fd, options);
  return fd;
}

Address bound_address(const Fd& fd) {
  sockaddr_in ip{};
  socklen_t length = sizeof ip;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&ip), &length) != 0)
    throw lightcc::system_error("HARP: asking for the port of a UDP socket");
  Address address;
  std::memcpy(address.bytes.data(), &ip, sizeof ip);
  address.size = sizeof ip;
  return address;
}

// Full packets that a socket holds unread. The kernel charges each with its buffer, the next power of two, and what
// stands beside it; and it forgets what was read only when that is a quarter of the buffer (udp_rmem_release).
uint32_t held_packets(const Fd& fd, uint32_t payload) {
  constexpr size_t kShared = 320, kBeside = 256;  // skb_shared_info within the buffer, sk_buff outside
  int granted = 0;
  socklen_t length = sizeof granted;
  if (getsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &granted, &length) != 0)
    throw lightcc::system_error("HARP: asking for the buffer of a UDP socket");
  size_t buffer = 2048;
  while (buffer < payload + kHeaderBytes + kUdpHeaders + kShared) buffer *= 2;
  const size_t packets = static_cast<size_t>(granted) / 4 * 3 / (buffer + kBeside);
  return static_cast<uint32_t>(std::max<size_t>(packets, 1));
}

size_t mtu_of(const UdpOptions& options, const Interface& interface) {
  const size_t mtu = std::min<size_t>(options.mtu ? options.mtu : interface.mtu, kLargestMtu);
  if (mtu < 576)
    throw Error(Code::invalid_argument,
                "HARP: an MTU of " + std::to_string(mtu) + " is too small, 576 is the least that works");
  return mtu;
}

Caps caps_of(const UdpOptions& options, const Interface& interface) {
  if (options.locals < 1) throw Error(Code::invalid_argument, "HARP: a UDP port needs a socket");
  const size_t around = kUdpHeaders + kHeaderBytes + (options.tags ? kTagBytes : 0);
  const auto payload = static_cast<uint32_t>((mtu_of(options, interface) - around) / kOffsetUnit * kOffsetUnit);
  return {.name = "udp",
          .payload = payload,
          .receive_packets = 0,
          .holds_payload = false,
          .places_payload = true,
          .zero_copy = false,
          .sent_together = options.gso ? UdpSender::segments(payload + around - kUdpHeaders) : 1,
          .locals = options.locals,
          .speed_mbit = interface.speed_mbit,
          .address = {}};
}

class Udp : public UdpPort {
 public:
  explicit Udp(const UdpOptions& options)
      : caps_(caps_of(options, choose_interfaces(options.address).front())),
        places_(!options.tags),
        pools_(caps_.payload + kTagBytes, options.gro),
        sender_(options.gso, counters_) {
    // One socket is its own doorbell: to be watched by epoll costs each of its packets time.
    if (options.locals > 1) {
      bell_ = Fd(epoll_create1(EPOLL_CLOEXEC));
      if (!bell_) throw lightcc::system_error("HARP: making an epoll descriptor");
    }
    for (int i = 0; i < options.locals; ++i) {
      sockets_.push_back(open_socket(options));
      const int fd = sockets_.back().get();
      not_inherited_.emplace_back(fd);
      epoll_event event{.events = EPOLLIN, .data = {}};
      if (bell_ && epoll_ctl(bell_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
        throw lightcc::system_error("HARP: watching a UDP socket");
      receivers_.emplace_back(fd, static_cast<uint16_t>(i), caps_.payload + static_cast<uint32_t>(kTagBytes),
                              options.gro, pools_, counters_);
    }
    caps_.address = bound_address(sockets_[0]);
    caps_.receive_packets = held_packets(sockets_[0], caps_.payload);
  }

  const Caps& caps() const override { return caps_; }
  const UdpCounters& counters() const override { return counters_; }
  int socket(int local) const override { return sockets_[static_cast<size_t>(local)].get(); }

  size_t tx(std::span<const TxPacket> packets) override {
    size_t taken = 0;
    while (taken < packets.size()) {
      const uint16_t local = packets[taken].local;
      size_t count = 1;
      while (taken + count < packets.size() && packets[taken + count].local == local) ++count;
      const size_t sent = sender_.send(sockets_[local].get(), packets.subspan(taken, count));
      taken += sent;
      if (sent < count) break;
    }
    done_ += taken;
    return taken;
  }
  uint64_t tx_done() override { return done_; }  // the kernel has copied

  size_t rx(std::span<RxPacket> packets, std::span<const Expected> expected) override {
    if (!places_) expected = {};
    // The socket that had packets last comes first, and now and then another, so that it cannot keep them waiting.
    const bool other_first = receivers_.size() > 1 && ++rounds_ % kRoundsPerLook == 0;
    if (!other_first) {
      const size_t count = receivers_[current_].receive(packets, expected);
      if (count > 0 || receivers_.size() == 1) return count;
    }
    other_ = (other_ + 1) % receivers_.size();
    if (other_ == current_) other_ = (other_ + 1) % receivers_.size();
    const size_t count = receivers_[other_].receive(packets, expected);
    if (count > 0 && !other_first) std::swap(current_, other_);
    return count > 0 || !other_first ? count : receivers_[current_].receive(packets, expected);
  }
  void release(std::span<const RxPacket> packets) override {
    for (const RxPacket& packet : packets) UdpReceiver::release(packet, pools_);
  }

  int descriptor() const override { return bell_ ? bell_.get() : sockets_[0].get(); }
  bool arm() override {
    for (const UdpReceiver& receiver : receivers_)
      if (receiver.holds_more()) return false;
    pollfd one{.fd = descriptor(), .events = POLLIN, .revents = 0};
    return poll(&one, 1, 0) == 0;
  }
  void disarm() override {}

 private:
  Caps caps_;
  const bool places_;
  UdpCounters counters_;
  UdpPools pools_;
  UdpSender sender_;
  Fd bell_;
  std::vector<Fd> sockets_;
  std::vector<NotInherited> not_inherited_;
  std::vector<UdpReceiver> receivers_;
  size_t current_ = 0, other_ = 0;
  uint32_t rounds_ = 0;
  uint64_t done_ = 0;
};

}  // namespace

std::unique_ptr<UdpPort> open_udp(const UdpOptions& options) { return std::make_unique<Udp>(options); }

}  // namespace harp
