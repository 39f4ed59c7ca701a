#include "net/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/text.h"

namespace lightcc {
namespace {

constexpr int kLargestPort = 65535;

std::optional<int> number(std::string_view text, int largest) {
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > largest) return {};
  return value;
}

std::optional<Address> read_v4(const std::string& host, int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(uint16_t(port));
  if (inet_pton(AF_INET, host.c_str(), &address.sin_addr) != 1) return {};
  return Address(reinterpret_cast<sockaddr*>(&address), sizeof address);
}

std::optional<Address> read_v6(const std::string& host, int port) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(uint16_t(port));
  const size_t percent = host.find('%');
  if (inet_pton(AF_INET6, host.substr(0, percent).c_str(), &address.sin6_addr) != 1) return {};
  if (percent != std::string::npos) {
    const std::string scope = host.substr(percent + 1);
    address.sin6_scope_id = if_nametoindex(scope.c_str());
    if (address.sin6_scope_id == 0) address.sin6_scope_id = uint32_t(number(scope, INT32_MAX).value_or(0));
    if (address.sin6_scope_id == 0) return {};
  }
  return Address(reinterpret_cast<sockaddr*>(&address), sizeof address);
}

// None if it is no numeric address.
std::optional<Address> read(std::string_view text) {
  if (text.find('\0') != text.npos) return {};  // what follows would not be looked at
  if (text.starts_with('[')) {
    const size_t close = text.find(']');
    if (close == text.npos) return {};
    const std::string_view host = text.substr(1, close - 1), rest = text.substr(close + 1);
    if (rest.empty()) return read_v6(std::string(host), 0);
    const auto port = rest[0] == ':' ? number(rest.substr(1), kLargestPort) : std::nullopt;
    return port ? read_v6(std::string(host), *port) : std::nullopt;
  }
  const size_t colon = text.find(':');
  if (colon == text.npos) return read_v4(std::string(text), 0);
  if (text.find(':', colon + 1) != text.npos) return read_v6(std::string(text), 0);
  const auto port = number(text.substr(colon + 1), kLargestPort);
  return port ? read_v4(std::string(text.substr(0, colon)), *port) : std::nullopt;
}

Address of_socket(int fd, int (*get)(int, sockaddr*, socklen_t*), const char* attempted) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (get(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) throw system_error(attempted);
  return Address(reinterpret_cast<sockaddr*>(&address), length);
}

const sockaddr_in& v4(const sockaddr_in6& storage) { return reinterpret_cast<const sockaddr_in&>(storage); }

}  // namespace

Address::Address(const sockaddr* address, socklen_t length) {
  if (length >= sizeof(sockaddr_in) && address->sa_family == AF_INET) {
    std::memcpy(&storage_, address, sizeof(sockaddr_in));
    length_ = sizeof(sockaddr_in);
  } else if (length >= sizeof(sockaddr_in6) && address->sa_family == AF_INET6) {
    std::memcpy(&storage_, address, sizeof storage_);
    storage_.sin6_flowinfo = 0;
    length_ = sizeof storage_;
    if (!IN6_IS_ADDR_V4MAPPED(&storage_.sin6_addr)) return;
    sockaddr_in wrapped{};
    wrapped.sin_family = AF_INET;
    wrapped.sin_port = storage_.sin6_port;
    std::memcpy(&wrapped.sin_addr, storage_.sin6_addr.s6_addr + 12, sizeof wrapped.sin_addr);
    *this = Address(reinterpret_cast<sockaddr*>(&wrapped), sizeof wrapped);
  } else {
    throw Error(Code::internal, "an address is neither IPv4 nor IPv6");
  }
}

Address Address::parse(std::string_view text) {
  if (auto address = read(text)) return *address;
  throw Error(Code::invalid_argument, "'" + shown(text) + "' is no address: expected one as 10.0.0.1, " +
                                          "10.0.0.1:4711, ::1 or [fe80::1%eth0]:4711");
}

std::vector<Address> Address::resolve(const std::string& host, int port) {
  if (auto numeric = read(host); numeric && numeric->port() == 0) return {numeric->with_port(port)};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;  // else each address comes once for every kind of socket
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  std::vector<Address> addresses;
  for (; found; found = found->ai_next)
    if (found->ai_family == AF_INET || found->ai_family == AF_INET6)
      addresses.push_back(Address(found->ai_addr, found->ai_addrlen).with_port(port));
  return addresses;
}

int Address::port() const { return ntohs(storage_.sin6_port); }  // lies where sin_port does

Address Address::with_port(int port) const {
  Address address = *this;
  address.storage_.sin6_port = htons(uint16_t(port));
  return address;
}

bool Address::is_loopback() const {
  if (family() == AF_INET) return ntohl(v4(storage_).sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  return family() == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&storage_.sin6_addr);
}

std::string Address::text() const {
  if (!*this) return "";
  char host[INET6_ADDRSTRLEN] = "";
  if (family() == AF_INET) {
    inet_ntop(AF_INET, &v4(storage_).sin_addr, host, sizeof host);
    return port() ? host + (":" + std::to_string(port())) : host;
  }
  inet_ntop(AF_INET6, &storage_.sin6_addr, host, sizeof host);
  std::string text = host;
  if (const uint32_t scope = storage_.sin6_scope_id) {
    char name[IF_NAMESIZE];
    text += "%" + (if_indextoname(scope, name) ? std::string(name) : std::to_string(scope));
  }
  return port() ? "[" + text + "]:" + std::to_string(port()) : text;
}

bool Address::same_host(const Address& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET) return v4(storage_).sin_addr.s_addr == v4(other.storage_).sin_addr.s_addr;
  return std::memcmp(&storage_.sin6_addr, &other.storage_.sin6_addr, sizeof storage_.sin6_addr) == 0 &&
         storage_.sin6_scope_id == other.storage_.sin6_scope_id;
}

Address local_address(int fd) { return of_socket(fd, getsockname, "asking for a connection's own address"); }
Address peer_address(int fd) {
  return of_socket(fd, getpeername, "asking for the address of a connection's other end");
}

Address any_address() {
  const Address any = Address::parse("::");
  const Fd fd(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return fd && bind(fd.get(), any.get(), any.length()) == 0 ? any : Address::parse("0.0.0.0");
}

Ports parse_ports(std::string_view text) {
  const size_t dash = text.find('-');
  const auto first = number(text.substr(0, dash), kLargestPort);
  const auto last = dash == text.npos ? first : number(text.substr(dash + 1), kLargestPort);
  // 0 alone means any: a range from 0 means nothing.
  if (!first || !last || *first > *last || (*first == 0 && dash != text.npos))
    throw Error(Code::invalid_argument,
                "'" + std::string(text) + "' is no range of ports: expected one as 20000-20100, 20000, or 0 for any");
  return {*first, *last};
}

int connect_from(const Fd& socket, const Address& to, const Address& from) {
  if (from && from.family() == to.family() && bind(socket.get(), from.with_port(0).get(), from.length()) != 0)
    return errno;
  return connect(socket.get(), to.get(), to.length()) == 0 || errno == EINPROGRESS ? 0 : errno;
}

Fd listen_on(const Address& at, Ports ports) {
  const Address any_v6 = Address::parse("::");
  for (int port = ports.first; port <= ports.last; ++port) {
    const Address address = at.with_port(port);
    const auto failed = [&] { return system_error("listening on " + address.text()); };
    Fd fd(socket(at.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) throw failed();
    const int yes = 1, no = 0;
    // What a former process left in TIME_WAIT does not hold a port of a range; a listener still does.
    if (setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0) throw failed();
    if (at.same_host(any_v6) && setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) != 0) throw failed();
    if (bind(fd.get(), address.get(), address.length()) == 0 && listen(fd.get(), SOMAXCONN) == 0) return fd;
    if (errno != EADDRINUSE) throw failed();
  }
  const std::string range =
      std::to_string(ports.first) + (ports.last > ports.first ? "-" + std::to_string(ports.last) : "");
  throw Error(Code::internal, "cannot listen on " + at.with_port(0).text() + ": no port of " + range + " is free");
}

}  // namespace lightcc
