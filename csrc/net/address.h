// Addresses of the network, IPv4 and IPv6 alike: text to address and back, the interfaces of this host, listening.
#pragma once
#include <netinet/in.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace lightcc {

class Address {
 public:
  Address() = default;                             // none
  // An IPv4 address that IPv6 wraps (::ffff:10.0.0.1, what a dual-stack listener sees) becomes the IPv4 address it is.
  // Throws Error{internal} for other families.
  Address(const sockaddr*, socklen_t);
  // A numeric address, "10.0.0.1", "10.0.0.1:4711", "::1", "[fe80::1%eth0]:4711"; the port is 0 if none is given.
  // Throws Error{invalid_argument} on anything else.
  static Address parse(std::string_view);
  // Also names, as the system resolves them (that may block for as long as the resolver takes). Empty: unknown.
  static std::vector<Address> resolve(const std::string& host, int port);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  explicit operator bool() const { return length_ != 0; }
  int family() const { return storage_.sin6_family; }
  int port() const;
  Address with_port(int port) const;
  bool is_loopback() const;
  std::string text() const;                        // as parse() reads it; "" of none
  bool same_host(const Address&) const;            // equal but for the port

 private:
  sockaddr_in6 storage_{};                         // holds a sockaddr_in as well
  socklen_t length_ = 0;
};

Address local_address(int fd);
Address peer_address(int fd);

struct Interface { std::string name; Address address; };

// The interfaces of this host that are up and have addresses that other hosts may reach (no link-local ones), by
// preference.
std::vector<Interface> interfaces();
// Loopback last; before it those that only containers and virtual machines use (docker0, virbr0, veth..., cni...,
// br-...). Otherwise the order stays.
std::vector<Interface> by_preference(std::vector<Interface>);
// Those that `list` allows, in its order: "eth0,ib" (names that begin so), "=eth0,ib0" (exactly), "^docker,lo" (all
// but), "^=lo". An empty list allows all. As NCCL_SOCKET_IFNAME. Throws Error{invalid_argument} naming the interfaces
// there are if none is left.
std::vector<Interface> chosen(const std::vector<Interface>&, std::string_view list);

// Where a rank's links go when `list` has allowed these interfaces: one address of each that it names, in its order, of
// the first one's family. A name stands for the interface that has it, or else for all that begin so, in the order of
// their names. A list that names none ("", "^docker0") is about one, the first: others may lead nowhere.
std::vector<Address> link_addresses(std::vector<Interface> allowed, std::string_view list);

struct Ports { int first = 0, last = 0; };         // 0: whichever is free
Ports parse_ports(std::string_view);               // "20000-20100", "20000", "0"; throws Error{invalid_argument}

// Non-blocking, close-on-exec TCP listener on the first free port; dual-stack when `at` is the IPv6 wildcard. Throws
// Error{internal} naming the range if all are taken.
Fd listen_on(const Address& at, Ports);
// Connects a non-blocking socket, from that address if it is one of the same family: 0, also while it is on its way; or
// an errno.
int connect_from(const Fd& socket, const Address& to, const Address& from);
Address any_address();                             // [::] if this host has IPv6, else 0.0.0.0

}  // namespace lightcc
