#include "harp_plugin/daemon/daemon.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "harp_plugin/port/descriptors.h"
#include "harp_plugin/port/interfaces.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr size_t kMostClients = 512;
constexpr int kBacklog = 64;

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

Fd new_socket() { return Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

template <class Value>
Value option_of(int socket, int option) {
  Value value{};
  socklen_t length = sizeof value;
  if (getsockopt(socket, SOL_SOCKET, option, &value, &length) != 0) refuse("a descriptor that is no socket");
  return value;
}

uint64_t network_of(int socket) {
#ifdef SO_NETNS_COOKIE
  return option_of<uint64_t>(socket, SO_NETNS_COOKIE);
#else
  return option_of<uint64_t>(socket, 71);
#endif
}

// Who holds a socket that is bound to a port may have what comes to it.
sockaddr_in port_of(const Fd& socket, const std::string& interface, uint64_t own_network) {
  if (option_of<int>(socket.get(), SO_DOMAIN) != AF_INET || option_of<int>(socket.get(), SO_TYPE) != SOCK_DGRAM ||
      option_of<int>(socket.get(), SO_PROTOCOL) != IPPROTO_UDP)
    refuse("a socket that is not UDP over IPv4");
  if (network_of(socket.get()) != own_network) refuse("a socket of another network namespace than harpd's");
  const sockaddr_in ip = address_of_socket(socket.get());
  char text[INET_ADDRSTRLEN];
  inet_ntop(AF_INET, &ip.sin_addr, text, sizeof text);
  for (const Interface& one : interfaces())
    if (one.name == interface && one.address == text && ip.sin_port != 0) return ip;
  refuse("a socket that is not bound to an address of " + interface);
}

std::optional<uint16_t> common(const std::vector<sockaddr_in>& some, const std::vector<sockaddr_in>& others) {
  for (const sockaddr_in& one : some)
    for (const sockaddr_in& other : others)
      if (one.sin_port == other.sin_port && one.sin_addr.s_addr == other.sin_addr.s_addr) return ntohs(one.sin_port);
  return {};
}

}  // namespace

Daemon::Daemon(const std::string& path, std::set<uid_t> users, std::function<void(const std::string&)> log)
    : path_(path), users_(std::move(users)), log_(std::move(log)), listener_(new_socket()) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) refuse("the path '" + path + "' is empty or too long");
  path.copy(address.sun_path, path.size());
  const auto* name = reinterpret_cast<const sockaddr*>(&address);
  // A path that a killed one left behind is taken over; that of a living one is not.
  const Fd probe = new_socket();
  if (connect(probe.get(), name, sizeof address) == 0) refuse("another harpd listens at " + path);
  if (errno == ECONNREFUSED) unlink(path.c_str());
  if (!listener_ || bind(listener_.get(), name, sizeof address) != 0 || chmod(path.c_str(), 0666) != 0 ||
      listen(listener_.get(), kBacklog) != 0)
    throw lightcc::system_error("listening at " + path);
}

Daemon::~Daemon() { unlink(path_.c_str()); }

void Daemon::run(int stop) {
  for (;;) {
    std::vector<pollfd> waiters = {{stop, POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& client : clients_) waiters.push_back({client->socket.get(), POLLIN, 0});
    if (poll(waiters.data(), waiters.size(), -1) < 0 && errno != EINTR) throw lightcc::system_error("waiting");
    if (waiters[0].revents) return;
    for (size_t i = 2; i < waiters.size(); ++i)
      if (waiters[i].revents && !serve(*clients_[i - 2])) clients_[i - 2].reset();
    std::erase(clients_, nullptr);
    if (waiters[1].revents) accept_client();
  }
}

void Daemon::accept_client() {
  auto client = std::make_unique<Client>();
  client->socket = Fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client->socket || clients_.size() >= kMostClients) return;
  client->who = option_of<ucred>(client->socket.get(), SO_PEERCRED);
  clients_.push_back(std::move(client));
}

bool Daemon::serve(Client& client) {
  HarpdRequest request;
  std::vector<Fd> udp;
  const Heard heard = receive_with_descriptors(client.socket.get(), &request, sizeof request, &udp);
  if (heard == Heard::nothing) return true;
  if (heard == Heard::end || !client.queues.empty()) {  // it has ended, or asks a second time
    release(client);
    return false;
  }
  HarpdReply reply;
  std::vector<XskSocket> sockets;
  try {
    sockets = grant(client, request, udp);
    reply.queues = static_cast<uint32_t>(sockets.size());
    reply.zero_copy = std::all_of(sockets.begin(), sockets.end(), [](const XskSocket& one) { return one.zero_copy; });
    reply.segments = std::all_of(sockets.begin(), sockets.end(), [](const XskSocket& one) { return one.segments; });
  } catch (const std::exception& error) {
    release(client);
    std::string_view(error.what()).copy(reply.text, sizeof reply.text - 1);
  }
  log_("process " + std::to_string(client.who.pid) + " of user " + std::to_string(client.who.uid) + ": " +
       (reply.queues ? std::to_string(reply.queues) + " queues of " + client.interface
                     : "refused: " + std::string(reply.text)));
  std::vector<int> descriptors;
  for (const XskSocket& one : sockets) descriptors.insert(descriptors.end(), {one.socket.get(), one.memory.get()});
  const bool sent = send_with_descriptors(client.socket.get(), &reply, sizeof reply, descriptors);
  if (!sent) release(client);
  return sent && reply.queues > 0;
}

std::vector<XskSocket> Daemon::grant(Client& client, const HarpdRequest& request, const std::vector<Fd>& udp) {
  if (request.magic != HarpdRequest::kMagic || request.version != HarpdRequest::kVersion)
    refuse("the request is not one of this version");
  if (client.who.uid != 0 && !users_.contains(client.who.uid))
    refuse("user " + std::to_string(client.who.uid) + " is not served (harpd --allow)");
  const std::string interface(request.interface, strnlen(request.interface, sizeof request.interface));
  if (request.copies > static_cast<uint32_t>(XskCopies::never)) refuse("the request is malformed");
  if (udp.empty() || udp.size() > kMostHarpdSockets)
    refuse("1 to " + std::to_string(kMostHarpdSockets) + " UDP sockets are expected, not " +
           std::to_string(udp.size()));
  std::vector<sockaddr_in> ports;
  for (const Fd& one : udp) ports.push_back(port_of(one, interface, network_of(listener_.get())));
  for (const auto& other : clients_)
    if (const auto port = common(other->ports, ports))
      refuse("port " + std::to_string(*port) + " is served for process " + std::to_string(other->who.pid));

  client.interface = interface;
  Nic& nic = nics_.try_emplace(interface, interface).first->second;
  std::vector<XskSocket> sockets;
  const uint32_t all = queues_of(interface);
  std::string why = "all " + std::to_string(all) + " queues of " + interface + " are in use";
  for (uint32_t queue = 0; queue < all && (request.queues == 0 || sockets.size() < request.queues); ++queue) {
    if (nic.taken.contains(queue)) continue;
    try {
      sockets.push_back(open_xsk(interface, queue, static_cast<XskCopies>(request.copies)));
    } catch (const Error& error) {  // taken by somebody whom harpd does not know
      why = error.what();
      continue;
    }
    nic.taken.insert(queue);
    client.queues.push_back(queue);
    client.ports = ports;
    for (const sockaddr_in& one : ports)
      nic.filter.admit(one.sin_addr.s_addr, one.sin_port, queue, sockets.back().socket.get());
  }
  if (sockets.empty()) refuse(why);
  return sockets;
}

void Daemon::release(Client& client) {
  const auto nic = nics_.find(client.interface);
  if (nic == nics_.end()) return;
  for (const uint32_t queue : client.queues) {
    for (const sockaddr_in& one : client.ports) nic->second.filter.forget(one.sin_addr.s_addr, one.sin_port, queue);
    nic->second.taken.erase(queue);
  }
  client.queues.clear();
  client.ports.clear();
  if (nic->second.taken.empty()) nics_.erase(nic);  // detaches the program
}

}  // namespace harp
