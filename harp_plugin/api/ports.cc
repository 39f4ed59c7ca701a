#include "harp_plugin/api/ports.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstring>

#include "base/error.h"
#include "harp_plugin/port/interfaces.h"
#include "harp_plugin/port/mem.h"
#include "harp_plugin/port/shm.h"
#include "harp_plugin/port/udp.h"
#include "harp_plugin/port/xdp.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;

// All contexts of a process reach each other.
std::shared_ptr<MemNetwork> process_network() {
  static const std::shared_ptr<MemNetwork> network = make_mem_network();
  return network;
}

// An address whose bytes are not text.
std::string in_hexadecimal(const Address& address) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < address.size; ++i) text += {kDigits[address.bytes[i] / 16], kDigits[address.bytes[i] % 16]};
  return text;
}

// Packets of the payload that udp has with this MTU.
std::unique_ptr<Port> open_mem_of(const Config& config) {
  constexpr uint32_t kHeaders = 20 + 8 + kHeaderBytes;
  if (config.mtu == 0) return open_mem(process_network());
  return open_mem(process_network(), (config.mtu - kHeaders) / kOffsetUnit * kOffsetUnit);
}

UdpOptions udp_options_of(const Config& config) {
  return {.address = choose_interfaces(config.interface).front().address,
          .locals = config.paths,
          .first_port = config.first_port,
          .last_port = config.last_port,
          .mtu = config.mtu,
          .tags = config.authenticate,
          .cookie = config.authenticate ? std::optional(cookie_of(config.secret)) : std::nullopt,
          .gso = config.gso,
          .gro = config.gro};
}

std::unique_ptr<Port> open_udp_of(const Config& config) { return open_udp(udp_options_of(config)); }

std::unique_ptr<Port> open_xdp_of(const Config& config) {
  return open_xdp({.udp = udp_options_of(config),
                   .copies = config.xdp_copies,
                   .queues = config.xdp_queues,
                   .harpd = config.harpd,
                   .survives_harpd = config.xdp_fallback});
}

std::string in_dots(const Address& address) {
  sockaddr_in ip{};
  if (address.size != sizeof ip) return in_hexadecimal(address);
  std::memcpy(&ip, address.bytes.data(), sizeof ip);
  char text[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &ip.sin_addr, text, sizeof text);
  return std::string(text) + ":" + std::to_string(ntohs(ip.sin_port));
}

struct PortKind {
  const char* name;
  std::unique_ptr<Port> (*open)(const Config&);
  std::string (*text)(const Address&);
};

const PortKind kKinds[] = {
    {"udp", open_udp_of, in_dots},
    {"xdp", open_xdp_of, in_dots},
    {"shm", [](const Config&) -> std::unique_ptr<Port> { return open_shm(); }, in_hexadecimal},
    {"mem", open_mem_of, in_hexadecimal},
};

const PortKind& kind_of(const std::string& name) {
  std::string all;
  for (const PortKind& kind : kKinds) {
    if (name == kind.name) return kind;
    all += (all.empty() ? "" : ", ") + std::string(kind.name);
  }
  throw Error(Code::invalid_argument, "opening a context: there is no port " + name + ", only " + all +
                                          "; set HARP_PORT or harp_options.port");
}

}  // namespace

std::unique_ptr<Port> open_port(const Config& config) { return kind_of(config.port).open(config); }

std::string name_of_peer(const std::string& port, const Address& address) { return kind_of(port).text(address); }

}  // namespace harp
