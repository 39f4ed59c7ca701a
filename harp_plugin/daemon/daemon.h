// harpd: opens AF_XDP sockets for processes that have not the privileges. A process shows the UDP sockets whose packets
// it wants; what it gets are sockets of free queues, bound, with their memory. The XDP program of an interface is
// attached as long as somebody is served there. When a process ends, or closes its connection, all of it is undone.
//
// harpd keeps the UDP sockets too: while a port is served nobody else can be bound to it. From a user that it does not
// serve it reads nothing, and nothing that has been passed to it is closed where it could wait.
#pragma once
#include <sys/socket.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "harp_plugin/port/xdp_lease.h"

namespace harp {

struct DaemonOptions {
  std::string path;                  // where it listens
  std::optional<gid_t> group = {};   // members may connect, beside root; nothing: anybody may, and is then refused
  std::set<uid_t> users = {};        // that are served beside root
  std::function<void(const std::string&)> log = [](const std::string&) {};  // gets a line of text for each request
};

class Daemon {
 public:
  explicit Daemon(const DaemonOptions&);  // throws lightcc::Error
  ~Daemon();
  void run(int stop);  // until this descriptor is readable

 private:
  struct Client {
    lightcc::Fd socket;
    ucred who{};
    uint64_t since_ns = 0;
    bool refused = false;            // another user's: it was told so when it came, and nothing is read from it
    bool gone = false;
    std::string interface;           // where it is served
    std::vector<uint32_t> queues;    // none: it has not asked yet
    std::vector<lightcc::Fd> udp;
    std::vector<sockaddr_in> ports;  // that these are bound to
  };
  struct Nic {
    explicit Nic(const std::string& interface) : filter(interface) {}
    XdpFilter filter;
    std::set<uint32_t> taken;  // queues
  };

  void accept_client();
  bool is_served(const Client&) const;
  void refuse_stranger(Client&);
  void serve(Client&);
  std::vector<XskSocket> grant(Client&, const HarpdRequest&, std::vector<lightcc::Fd>* udp);
  std::vector<XskSocket> open_queues(Client&, const HarpdRequest&);
  void release(Client&);
  void look_after_clients();

  const DaemonOptions options_;
  lightcc::Fd lock_, listener_;
  uint64_t inode_ = 0;  // of the path
  uint64_t accepts_ns_ = 0;  // when somebody is accepted again: there were no descriptors
  std::vector<std::unique_ptr<Client>> clients_;
  std::map<std::string, Nic> nics_;
};

}  // namespace harp
