#include "harp_plugin/port/neighbors.h"

#include <linux/rtnetlink.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstring>

namespace harp {

namespace {

using lightcc::Fd;

}  // namespace

Neighbors::Neighbors(const std::string& interface, uint32_t from)
    : interface_(interface),
      index_(if_nametoindex(interface.c_str())),
      from_(from),
      routes_(socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE)),
      datagrams_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in own{};
  own.sin_family = AF_INET;
  own.sin_addr.s_addr = from;
  const uint32_t only = htonl(index_);
  if (!routes_ || !datagrams_ ||
      setsockopt(datagrams_.get(), IPPROTO_IP, IP_UNICAST_IF, &only, sizeof only) != 0 ||
      bind(datagrams_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof own) != 0)
    throw lightcc::system_error("HARP: asking for neighbours on " + interface);
  if (!read_own())
    throw lightcc::Error(lightcc::Code::invalid_argument,
                         "HARP: " + interface + " is no Ethernet, which port xdp needs");
}

bool Neighbors::read_own() {
  ifreq request{};
  interface_.copy(request.ifr_name, IFNAMSIZ - 1);
  if (ioctl(datagrams_.get(), SIOCGIFHWADDR, &request) != 0) return false;
  if (request.ifr_hwaddr.sa_family != ARPHRD_ETHER) return false;
  std::memcpy(own_.data(), request.ifr_hwaddr.sa_data, own_.size());
  return true;
}

std::optional<EthernetAddress> Neighbors::find(const sockaddr_in& to) {
  const std::optional<uint32_t> hop = next_hop(to.sin_addr.s_addr);
  if (!hop || !read_own()) return {};
  sendto(datagrams_.get(), nullptr, 0, MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(&to), sizeof to);
  arpreq request{};
  sockaddr_in ip{};
  ip.sin_family = AF_INET;
  ip.sin_addr.s_addr = *hop;
  std::memcpy(&request.arp_pa, &ip, sizeof ip);
  interface_.copy(request.arp_dev, sizeof request.arp_dev - 1);
  if (ioctl(datagrams_.get(), SIOCGARP, &request) != 0 || !(request.arp_flags & ATF_COM)) return {};
  EthernetAddress found;
  std::memcpy(found.data(), request.arp_ha.sa_data, found.size());
  return found;
}

// rtnetlink(7). With several interfaces in a network, or rules by source, the way depends on all three.
std::optional<uint32_t> Neighbors::next_hop(uint32_t address) {
  struct Attribute {
    rtattr head;
    uint32_t value;
  };
  struct {
    nlmsghdr head{};
    rtmsg route{};
    Attribute to, from, over;
  } ask{.to = {{RTA_LENGTH(sizeof address), RTA_DST}, address},
        .from = {{RTA_LENGTH(sizeof from_), RTA_SRC}, from_},
        .over = {{RTA_LENGTH(sizeof index_), RTA_OIF}, index_}};
  ask.head.nlmsg_len = sizeof ask;
  ask.head.nlmsg_type = RTM_GETROUTE;
  ask.head.nlmsg_flags = NLM_F_REQUEST;
  ask.route.rtm_family = AF_INET;
  ask.route.rtm_dst_len = ask.route.rtm_src_len = 32;
  alignas(nlmsghdr) char answer[4096];
  if (send(routes_.get(), &ask, sizeof ask, 0) != sizeof ask) return {};
  const ssize_t bytes = recv(routes_.get(), answer, sizeof answer, MSG_DONTWAIT);  // the kernel answers at once
  const auto* head = reinterpret_cast<const nlmsghdr*>(answer);
  if (bytes < ssize_t(sizeof *head) || !NLMSG_OK(head, static_cast<uint32_t>(bytes))) return {};
  if (head->nlmsg_type != RTM_NEWROUTE || head->nlmsg_len < NLMSG_LENGTH(sizeof(rtmsg))) return {};
  const auto* route = static_cast<const rtmsg*>(NLMSG_DATA(head));
  if (route->rtm_type != RTN_UNICAST) return {};
  uint32_t hop = address, over = 0;
  int rest = static_cast<int>(RTM_PAYLOAD(head));
  for (const rtattr* one = RTM_RTA(route); RTA_OK(one, rest); one = RTA_NEXT(one, rest)) {
    if (one->rta_type == RTA_OIF) std::memcpy(&over, RTA_DATA(one), sizeof over);
    if (one->rta_type == RTA_GATEWAY) std::memcpy(&hop, RTA_DATA(one), sizeof hop);
  }
  if (over != index_) return {};
  return hop;
}

}  // namespace harp
