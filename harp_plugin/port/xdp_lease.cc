#include "harp_plugin/port/xdp_lease.h"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "harp_plugin/port/descriptors.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr int kHarpdTimeoutMs = 10'000;

Fd connect_to_harpd(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path) throw Error(Code::invalid_argument, "HARP: too long a path: " + path);
  path.copy(address.sun_path, path.size());
  Fd daemon(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const timeval patience{kHarpdTimeoutMs / 1000, 0};
  if (daemon) setsockopt(daemon.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (!daemon || connect(daemon.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
    throw lightcc::system_error("HARP: connecting to harpd at " + path + " (is it running? see HARP_HARPD)");
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(daemon.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 || (who.uid != 0 && who.uid != geteuid()))
    throw Error(Code::invalid_argument, "HARP: who listens at " + path + " is neither root nor this user: not trusted");
  return daemon;
}

bool wait_for_answer(const Fd& daemon) {
  pollfd waiter{daemon.get(), POLLIN, 0};
  int ready;
  do ready = poll(&waiter, 1, kHarpdTimeoutMs);
  while (ready < 0 && errno == EINTR);
  return ready == 1;
}

}  // namespace

uint32_t queues_of(const std::string& interface) {
  const Fd any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ethtool_channels channels{};
  channels.cmd = ETHTOOL_GCHANNELS;
  ifreq request{};
  interface.copy(request.ifr_name, IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&channels);
  if (!any || ioctl(any.get(), SIOCETHTOOL, &request) != 0) return 1;  // a driver that does not say has one
  return std::clamp(channels.combined_count + channels.rx_count, 1u, kMostXdpQueues);
}

sockaddr_in address_of_socket(int socket) {
  sockaddr_in ip{};
  socklen_t length = sizeof ip;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&ip), &length) != 0 || ip.sin_family != AF_INET)
    throw lightcc::system_error("HARP: asking for the address of a UDP socket");
  return ip;
}

XdpLease own_lease(const XdpWish& wish, std::span<const sockaddr_in> udp) {
  XdpLease lease{.sockets = {}, .filter = std::make_unique<XdpFilter>(wish.interface), .daemon = Fd()};
  const uint32_t all = queues_of(wish.interface);
  for (uint32_t queue = 0; queue < (wish.queues ? std::min(wish.queues, all) : all); ++queue) {
    lease.sockets.push_back(open_xsk(wish.interface, queue, wish.copies));
    for (const sockaddr_in& one : udp)
      lease.filter->admit(one.sin_addr.s_addr, one.sin_port, queue, lease.sockets.back().socket.get());
  }
  return lease;
}

XdpLease lease_from_harpd(const std::string& path, const XdpWish& wish, std::span<const int> udp_sockets) {
  XdpLease lease{.sockets = {}, .filter = nullptr, .daemon = connect_to_harpd(path)};
  HarpdRequest request;
  wish.interface.copy(request.interface, sizeof request.interface - 1);
  request.queues = wish.queues;
  request.copies = static_cast<uint32_t>(wish.copies);
  HarpdReply reply;
  std::vector<Fd> descriptors;
  send_with_descriptors(lease.daemon.get(), &request, sizeof request, udp_sockets);  // refused: the answer says why
  if (!wait_for_answer(lease.daemon) ||
      receive_with_descriptors(lease.daemon.get(), &reply, sizeof reply, &descriptors) != Heard::message ||
      reply.magic != HarpdRequest::kMagic || reply.version != HarpdRequest::kVersion)
    throw Error(Code::internal, "HARP: harpd at " + path + " did not answer, is of another version, or this process "
                                "may have no more open files");
  reply.text[sizeof reply.text - 1] = '\0';
  if (reply.queues == 0) throw Error(Code::invalid_argument, "HARP: harpd at " + path + " refuses: " + reply.text);
  if (descriptors.size() != size_t{2} * reply.queues)
    throw Error(Code::internal, "HARP: harpd at " + path + " sent other sockets than it said");
  for (size_t i = 0; i < descriptors.size(); i += 2)
    lease.sockets.push_back({.socket = std::move(descriptors[i]),
                             .memory = std::move(descriptors[i + 1]),
                             .zero_copy = reply.zero_copy != 0,
                             .segments = reply.segments != 0});
  return lease;
}

}  // namespace harp
