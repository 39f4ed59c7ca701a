// harpd: opens AF_XDP sockets for processes that have not the privileges. A process shows the UDP sockets whose packets
// it wants; what it gets are sockets of free queues, bound, with their memory. The XDP program of an interface is
// attached as long as somebody is served there. When a process ends, or closes its connection, all of it is undone.
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

class Daemon {
 public:
  // Listens at this path, to which any user may connect; serves root and these users. `log` gets a line of text for
  // each request. Throws lightcc::Error.
  Daemon(const std::string& path, std::set<uid_t> users, std::function<void(const std::string&)> log);
  ~Daemon();
  void run(int stop);  // until this descriptor is readable

 private:
  struct Client {
    lightcc::Fd socket;
    ucred who{};
    std::string interface;           // where it is served
    std::vector<uint32_t> queues;
    std::vector<sockaddr_in> ports;
  };
  struct Nic {
    explicit Nic(const std::string& interface) : filter(interface) {}
    XdpFilter filter;
    std::set<uint32_t> taken;  // queues
  };

  void accept_client();
  bool serve(Client&);  // false: it is gone
  std::vector<XskSocket> grant(Client&, const HarpdRequest&, const std::vector<lightcc::Fd>& udp);
  void release(Client&);

  const std::string path_;
  const std::set<uid_t> users_;
  const std::function<void(const std::string&)> log_;
  lightcc::Fd listener_;
  std::vector<std::unique_ptr<Client>> clients_;
  std::map<std::string, Nic> nics_;
};

}  // namespace harp
