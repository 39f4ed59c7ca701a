// How a process comes to AF_XDP sockets that get the packets of its UDP sockets: by its own privileges, or from harpd,
// a daemon that has them.
#pragma once
#include <netinet/in.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "harp_plugin/port/xdp_filter.h"
#include "harp_plugin/port/xsk.h"

namespace harp {

inline constexpr uint32_t kMostXdpQueues = 64;

uint32_t queues_of(const std::string& interface);  // that it receives by
sockaddr_in address_of_socket(int socket);         // throws Error{internal}

struct XdpWish {
  std::string interface;
  uint32_t queues = 0;  // at most; 0: all that are free
  XskCopies copies = XskCopies::if_needed;
};

struct XdpLease {
  std::vector<XskSocket> sockets;     // of a queue each
  std::unique_ptr<XdpFilter> filter;  // where it is this process's own
  lightcc::Fd daemon;                 // else: as long as both ends hold it
};

XdpLease own_lease(const XdpWish&, std::span<const sockaddr_in> udp);
// `path`: where harpd listens. Throws Error{invalid_argument} with what harpd says, or {internal}.
XdpLease lease_from_harpd(const std::string& path, const XdpWish&, std::span<const int> udp_sockets);

// What they say to each other: one request and one reply a connection, which then stays open.
struct HarpdRequest {  // with 1 to 8 UDP sockets, whose ports shall be served
  static constexpr uint32_t kMagic = 0x48415244, kVersion = 1;
  uint32_t magic = kMagic, version = kVersion;
  char interface[16] = {};  // ends in 0
  uint32_t queues = 0;
  uint32_t copies = 0;  // XskCopies
};
struct HarpdReply {  // with socket and memory of each queue
  uint32_t magic = HarpdRequest::kMagic, version = HarpdRequest::kVersion;
  uint32_t queues = 0;  // 0: refused
  uint32_t zero_copy = 0, segments = 0;  // of all of them
  char text[512] = {};  // why it was refused; ends in 0
};
inline constexpr size_t kMostHarpdSockets = 8;

}  // namespace harp
