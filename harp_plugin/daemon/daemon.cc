#include "harp_plugin/daemon/daemon.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "harp_plugin/port/descriptors.h"
#include "harp_plugin/port/interfaces.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr size_t kMostClients = 512;
constexpr long kMostStrangers = 16;  // that are not served, and are told so once they ask
constexpr int kBacklog = 64, kLookMs = 1000;
constexpr uint64_t kPatienceNs = 5'000'000'000;  // with who has connected and asks nothing

[[noreturn]] void refuse(const std::string& why) { throw Error(Code::invalid_argument, why); }

Fd new_socket() { return Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

template <class Value>
Value option_of(int socket, int option) {
  Value value{};
  socklen_t length = sizeof value;
  if (getsockopt(socket, SOL_SOCKET, option, &value, &length) != 0)
    refuse("a descriptor that is no socket, or one that this kernel says too little of");
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

bool same(const sockaddr_in& a, const sockaddr_in& b) {
  return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr;
}

bool is_bound(const Fd& socket, const sockaddr_in& to) {
  sockaddr_in ip{};
  socklen_t length = sizeof ip;
  return getsockname(socket.get(), reinterpret_cast<sockaddr*>(&ip), &length) == 0 && same(ip, to);
}

}  // namespace

Daemon::Daemon(const DaemonOptions& options) : options_(options), listener_(new_socket()) {
  const std::string& path = options_.path;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) refuse("the path '" + path + "' is empty or too long");
  path.copy(address.sun_path, path.size());
  lock_ = Fd(open((path + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock_) throw lightcc::system_error("opening " + path + ".lock");
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) refuse("another harpd listens at " + path);
  struct stat status;
  if (lstat(path.c_str(), &status) == 0 && S_ISSOCK(status.st_mode)) unlink(path.c_str());  // a killed one's
  const mode_t before = umask(options_.group ? 0117 : 0111);
  const auto* name = reinterpret_cast<const sockaddr*>(&address);
  const bool bound = listener_ && bind(listener_.get(), name, sizeof address) == 0;
  umask(before);
  if (!bound || (options_.group && lchown(path.c_str(), 0, *options_.group) != 0) ||
      lstat(path.c_str(), &status) != 0 || listen(listener_.get(), kBacklog) != 0)
    throw lightcc::system_error("listening at " + path);
  inode_ = status.st_ino;
}

Daemon::~Daemon() {
  struct stat status;
  if (lstat(options_.path.c_str(), &status) == 0 && status.st_ino == inode_) unlink(options_.path.c_str());
}

void Daemon::run(int stop) {
  for (;;) {
    std::vector<pollfd> waiters = {{stop, POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const auto& client : clients_) waiters.push_back({client->socket.get(), POLLIN, 0});
    if (poll(waiters.data(), waiters.size(), clients_.empty() ? -1 : kLookMs) < 0 && errno != EINTR)
      throw lightcc::system_error("waiting");
    if (waiters[0].revents) return;
    for (size_t i = 2; i < waiters.size(); ++i)
      if (waiters[i].revents) serve(*clients_[i - 2]);
    look_after_clients();
    if (waiters[1].revents) accept_client();
  }
}

void Daemon::accept_client() {
  auto client = std::make_unique<Client>();
  client->socket = Fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!client->socket) return;
  client->who = option_of<ucred>(client->socket.get(), SO_PEERCRED);
  client->since_ns = lightcc::now_ns();
  const auto strangers = std::count_if(clients_.begin(), clients_.end(), [&](auto& one) { return !is_served(*one); });
  if (clients_.size() < kMostClients && (is_served(*client) || strangers < kMostStrangers))
    clients_.push_back(std::move(client));
}

bool Daemon::is_served(const Client& client) const {
  return client.who.uid == 0 || options_.users.contains(client.who.uid);
}

// Those that have ended, never ask, or have given up a port by the one way that there is (connecting to AF_UNSPEC).
void Daemon::look_after_clients() {
  const uint64_t now_ns = lightcc::now_ns();
  for (const auto& client : clients_) {
    if (client->queues.empty() && now_ns - client->since_ns > kPatienceNs) client->gone = true;
    for (size_t i = 0; i < client->udp.size(); ++i)
      if (!is_bound(client->udp[i], client->ports[i])) client->gone = true;
    if (client->gone) release(*client);
  }
  std::erase_if(clients_, [](const auto& client) { return client->gone; });
}

void Daemon::serve(Client& client) {
  HarpdRequest request;
  std::vector<Fd> udp;
  // A stranger's descriptors are not even received.
  const Heard heard = is_served(client)
                          ? receive_with_descriptors(client.socket.get(), &request, sizeof request, &udp)
                      : recv(client.socket.get(), &request, sizeof request, MSG_DONTWAIT) > 0 ? Heard::message
                                                                                              : Heard::end;
  if (heard == Heard::nothing) return;
  client.gone = heard == Heard::end || !client.queues.empty();  // it has ended, or asks a second time
  if (client.gone) return;
  HarpdReply reply;
  std::vector<XskSocket> sockets;
  try {
    sockets = grant(client, request, std::move(udp));
    reply.queues = static_cast<uint32_t>(sockets.size());
    reply.zero_copy = std::all_of(sockets.begin(), sockets.end(), [](const XskSocket& one) { return one.zero_copy; });
    reply.segments = std::all_of(sockets.begin(), sockets.end(), [](const XskSocket& one) { return one.segments; });
  } catch (const std::exception& error) {
    std::string_view(error.what()).copy(reply.text, sizeof reply.text - 1);
  }
  options_.log("process " + std::to_string(client.who.pid) + " of user " + std::to_string(client.who.uid) + ": " +
               (reply.queues ? std::to_string(reply.queues) + " queues of " + client.interface
                             : "refused: " + std::string(reply.text)));
  std::vector<int> descriptors;
  for (const XskSocket& one : sockets) descriptors.insert(descriptors.end(), {one.socket.get(), one.memory.get()});
  const bool sent = send_with_descriptors(client.socket.get(), &reply, sizeof reply, descriptors);
  client.gone = !sent || reply.queues == 0;
}

std::vector<XskSocket> Daemon::grant(Client& client, const HarpdRequest& request, std::vector<Fd> udp) {
  if (!is_served(client)) refuse("user " + std::to_string(client.who.uid) + " is not served (harpd --allow)");
  if (request.magic != HarpdRequest::kMagic || request.version != HarpdRequest::kVersion)
    refuse("the request is not one of this version");
  if (request.copies > static_cast<uint32_t>(XskCopies::never)) refuse("the request is malformed");
  const std::string interface(request.interface, strnlen(request.interface, sizeof request.interface));
  if (udp.empty() || udp.size() > kMostHarpdSockets)
    refuse("1 to " + std::to_string(kMostHarpdSockets) + " UDP sockets are expected, not " +
           std::to_string(udp.size()));
  std::vector<sockaddr_in> ports;
  for (const Fd& one : udp) {
    const sockaddr_in port = port_of(one, interface, network_of(listener_.get()));
    const auto is_it = [&](const sockaddr_in& other) { return same(port, other); };
    if (std::any_of(ports.begin(), ports.end(), is_it)) refuse("the same port twice");
    for (const auto& other : clients_)
      if (std::any_of(other->ports.begin(), other->ports.end(), is_it))
        refuse("port " + std::to_string(ntohs(port.sin_port)) + " is served for process " +
               std::to_string(other->who.pid));
    ports.push_back(port);
  }
  client.interface = interface;
  client.ports = std::move(ports);
  client.udp = std::move(udp);
  nics_.try_emplace(interface, interface);
  return open_queues(client, request);
}

std::vector<XskSocket> Daemon::open_queues(Client& client, const HarpdRequest& request) {
  Nic& nic = nics_.at(client.interface);
  std::vector<XskSocket> sockets;
  const uint32_t all = queues_of(client.interface);
  std::string why = "all " + std::to_string(all) + " queues of " + client.interface + " are in use";
  // Some may be taken by processes that harpd does not know. One that was given back is free in a moment.
  for (const uint64_t patience_ns : {uint64_t{0}, kXskLetGoNs}) {
    for (uint32_t queue = 0; queue < all && (request.queues == 0 || sockets.size() < request.queues); ++queue) {
      if (nic.taken.contains(queue)) continue;
      try {
        sockets.push_back(
            open_xsk(client.interface, queue, static_cast<XskCopies>(request.copies), patience_ns));
      } catch (const Error& error) {
        why = error.what();
        if (patience_ns > 0) break;
        continue;
      }
      nic.taken.insert(queue);
      client.queues.push_back(queue);
      for (const sockaddr_in& one : client.ports)
        nic.filter.admit(one.sin_addr.s_addr, one.sin_port, queue, sockets.back().socket.get());
    }
    if (!sockets.empty()) return sockets;
  }
  refuse(why);
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
  client.udp.clear();
  if (nic->second.taken.empty()) nics_.erase(nic);  // detaches the program
}

}  // namespace harp
