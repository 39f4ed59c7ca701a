#include "harp_plugin/daemon/daemon.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "base/clock.h"
#include "base/close_elsewhere.h"
#include "harp_plugin/port/descriptors.h"
#include "harp_plugin/port/interfaces.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr size_t kMostClients = 512;
constexpr long kMostStrangers = 16;  // that are not served, and have been told so
constexpr int kBacklog = 64;
constexpr int kLookMs = 1000, kServedLookMs = 50;  // while a client is served: one that gives a port up must not go on
constexpr int kPauseMs = 100;                      // without descriptors
constexpr uint64_t kPatienceNs = 5'000'000'000;  // with a client that has connected and asks nothing

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

// That it is bound to; "": none. Nothing: one that is gone.
std::optional<std::string> device_of(const Fd& socket) {
  char name[IFNAMSIZ] = "";
  socklen_t length = sizeof name;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_BINDTODEVICE, name, &length) != 0) return {};
  return std::string(name, strnlen(name, length));
}

bool same(const sockaddr_in& a, const sockaddr_in& b) {
  return a.sin_port == b.sin_port && a.sin_addr.s_addr == b.sin_addr.s_addr;
}

struct BoundSocket {
  uint32_t address, port;  // as in sockaddr_in, and in the host's order
  unsigned long inode;
};

// All UDP sockets of this network namespace, over IPv6 too: of their addresses the last 32 bits, which are IPv4's.
std::vector<BoundSocket> bound_sockets() {
  std::vector<BoundSocket> all;
  for (const char* file : {"/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"}) {
    std::ifstream lines(file);
    for (std::string line; std::getline(lines, line);) {
      char address[33] = "";
      BoundSocket one{};
      if (std::sscanf(line.c_str(), " %*d: %32[0-9A-F]:%x %*s %*s %*s %*s %*s %*u %*d %lu", address, &one.port,
                      &one.inode) != 3)
        continue;
      const size_t digits = std::strlen(address);
      one.address = static_cast<uint32_t>(std::strtoul(address + digits - std::min<size_t>(8, digits), nullptr, 16));
      all.push_back(one);
    }
  }
  return all;
}

// What comes to a port at this interface comes to this socket and no other. Sockets may share a port when they are
// bound to different devices, and go on to when they no longer are.
bool is_bound(const Fd& socket, const sockaddr_in& to, const std::string& interface,
              const std::vector<BoundSocket>& all) {
  sockaddr_in ip{};
  socklen_t length = sizeof ip;
  struct stat own;
  const auto device = device_of(socket);
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&ip), &length) != 0 || !same(ip, to) ||
      fstat(socket.get(), &own) != 0 || !device || !(device->empty() || *device == interface))
    return false;
  const auto is_there = [&](const BoundSocket& one) {
    return one.port == ntohs(to.sin_port) && (one.address == to.sin_addr.s_addr || one.address == INADDR_ANY);
  };
  const auto first = std::find_if(all.begin(), all.end(), is_there);
  return first != all.end() && first->inode == own.st_ino && std::none_of(first + 1, all.end(), is_there);
}

// A socket gives up the port that the kernel has chosen for it, and its device, when it is connected to no address
// (AF_UNSPEC); one that was bound by its number keeps the port. So that is done now, and cannot be done later.
void fix_port(const Fd& socket) {
  const std::string device = device_of(socket).value_or("");
  sockaddr none{};
  none.sa_family = AF_UNSPEC;
  connect(socket.get(), &none, sizeof none);
  if (!device.empty())
    setsockopt(socket.get(), SOL_SOCKET, SO_BINDTODEVICE, device.data(), static_cast<socklen_t>(device.size()));
}

// The holder of a socket that is bound to a port may have what comes to it.
sockaddr_in port_of(const Fd& socket, const std::string& interface, uint64_t own_network) {
  if (option_of<int>(socket.get(), SO_DOMAIN) != AF_INET || option_of<int>(socket.get(), SO_TYPE) != SOCK_DGRAM ||
      option_of<int>(socket.get(), SO_PROTOCOL) != IPPROTO_UDP)
    refuse("a socket that is not UDP over IPv4");
  if (network_of(socket.get()) != own_network) refuse("a socket of another network namespace than harpd's");
  const sockaddr_in ip = address_of_socket(socket.get());
  char text[INET_ADDRSTRLEN];
  inet_ntop(AF_INET, &ip.sin_addr, text, sizeof text);
  const auto is_its = [&](const Interface& one) { return one.name == interface && one.address == text; };
  const std::vector<Interface> all = interfaces();
  if (ip.sin_port == 0 || std::none_of(all.begin(), all.end(), is_its))
    refuse("a socket that is not bound to an address of " + interface);
  const std::string port = "port " + std::to_string(ntohs(ip.sin_port));
  if (!is_bound(socket, ip, interface, bound_sockets()))
    refuse("a socket that is bound to another device than " + interface + ", or another socket is bound to its " +
           port);
  fix_port(socket);
  if (!is_bound(socket, ip, interface, bound_sockets()))
    refuse("a socket whose " + port + " the kernel has chosen and which may give it up: bind it by its number");
  return ip;
}

bool has_hung_up(const Fd& socket) {
  pollfd one{socket.get(), 0, 0};
  return poll(&one, 1, 0) == 1 && (one.revents & (POLLHUP | POLLERR));
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
    const bool pauses = lightcc::now_ns() < accepts_ns_;
    std::vector<pollfd> waiters = {{stop, POLLIN, 0}, {pauses ? -1 : listener_.get(), POLLIN, 0}};
    for (const auto& client : clients_)
      waiters.push_back({client->socket.get(), static_cast<short>(client->refused ? 0 : POLLIN), 0});
    const int look_ms = !nics_.empty() ? kServedLookMs : pauses ? kPauseMs : clients_.empty() ? -1 : kLookMs;
    if (poll(waiters.data(), waiters.size(), look_ms) < 0 && errno != EINTR) throw lightcc::system_error("waiting");
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
  if (!client->socket) {
    if (errno != EAGAIN) accepts_ns_ = lightcc::now_ns() + kPauseMs * uint64_t{1'000'000};  // it stays in the queue
    return;
  }
  client->who = option_of<ucred>(client->socket.get(), SO_PEERCRED);
  client->since_ns = lightcc::now_ns();
  const auto strangers = std::count_if(clients_.begin(), clients_.end(), [&](auto& one) { return !is_served(*one); });
  if (!is_served(*client)) refuse_stranger(*client);
  if (clients_.size() < kMostClients && (is_served(*client) || strangers < kMostStrangers)) {
    clients_.push_back(std::move(client));
  } else {
    lightcc::close_elsewhere(std::move(client->socket));
  }
}

// It keeps its connection for a while, so that it can read why.
void Daemon::refuse_stranger(Client& client) {
  HarpdReply reply;
  const std::string why = "user " + std::to_string(client.who.uid) + " is not served (harpd --allow)";
  why.copy(reply.text, sizeof reply.text - 1);
  send_with_descriptors(client.socket.get(), &reply, sizeof reply, {});
  client.refused = true;
  options_.log("process " + std::to_string(client.who.pid) + ": refused: " + why);
}

bool Daemon::is_served(const Client& client) const {
  return client.who.uid == 0 || options_.users.contains(client.who.uid);
}

// Those that have ended, never ask, or no longer have what they showed.
void Daemon::look_after_clients() {
  const uint64_t now_ns = lightcc::now_ns();
  const std::vector<BoundSocket> bound = nics_.empty() ? std::vector<BoundSocket>() : bound_sockets();
  for (const auto& client : clients_) {
    if (client->queues.empty() && now_ns - client->since_ns > kPatienceNs) client->gone = true;
    for (size_t i = 0; i < client->udp.size(); ++i)
      if (!is_bound(client->udp[i], client->ports[i], client->interface, bound)) client->gone = true;
    if (!client->gone) continue;
    release(*client);
    lightcc::close_elsewhere(std::move(client->socket));
  }
  std::erase_if(clients_, [](const auto& client) { return client->gone; });
}

void Daemon::serve(Client& client) {
  // It has ended, also while others were served, asks a second time, or was a stranger.
  client.gone = client.refused || !client.queues.empty() || has_hung_up(client.socket);
  if (client.gone) return;
  HarpdRequest request;
  std::vector<Fd> udp;
  const Heard heard = receive_with_descriptors(client.socket.get(), &request, sizeof request, &udp);
  if (heard == Heard::nothing) return;
  client.gone = heard == Heard::end;
  if (client.gone) return;
  HarpdReply reply;
  std::vector<XskSocket> sockets;
  try {
    sockets = grant(client, request, &udp);
    reply.queues = static_cast<uint32_t>(sockets.size());
    reply.zero_copy = std::all_of(sockets.begin(), sockets.end(), [](const XskSocket& one) { return one.zero_copy; });
    reply.segments = std::all_of(sockets.begin(), sockets.end(), [](const XskSocket& one) { return one.segments; });
  } catch (const std::exception& error) {
    std::string_view(error.what()).copy(reply.text, sizeof reply.text - 1);
    lightcc::close_elsewhere(std::move(udp));
  }
  options_.log("process " + std::to_string(client.who.pid) + " of user " + std::to_string(client.who.uid) + ": " +
               (reply.queues ? std::to_string(reply.queues) + " queues of " + client.interface
                             : "refused: " + std::string(reply.text)));
  std::vector<int> descriptors;
  for (const XskSocket& one : sockets) descriptors.insert(descriptors.end(), {one.socket.get(), one.memory.get()});
  const bool sent = send_with_descriptors(client.socket.get(), &reply, sizeof reply, descriptors);
  client.gone = !sent || reply.queues == 0;
}

std::vector<XskSocket> Daemon::grant(Client& client, const HarpdRequest& request, std::vector<Fd>* udp) {
  if (request.magic != HarpdRequest::kMagic || request.version != HarpdRequest::kVersion)
    refuse("the request is not one of this version");
  if (request.copies > static_cast<uint32_t>(XskCopies::never)) refuse("the request is malformed");
  const std::string interface(request.interface, strnlen(request.interface, sizeof request.interface));
  if (udp->empty() || udp->size() > kMostHarpdSockets)
    refuse("1 to " + std::to_string(kMostHarpdSockets) + " UDP sockets are expected, not " +
           std::to_string(udp->size()));
  std::vector<sockaddr_in> ports;
  for (const Fd& one : *udp) {
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
  client.udp = std::exchange(*udp, {});
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
