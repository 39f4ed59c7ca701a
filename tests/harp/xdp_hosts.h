// Ports xdp on hosts of a network, each with an interface of its own.
#pragma once
#include <arpa/inet.h>

#include "contracts/port_contract.h"
#include "harp/veth.h"
#include "harp_plugin/port/xdp.h"

namespace harp {

class XdpHosts : public testing::Test {
 protected:
  static constexpr size_t kOnTheWay = 128;  // packets; a ring of veth holds 256

  void SetUp() override {
    if (const std::string missing = VethNetwork::missing(); !missing.empty()) GTEST_SKIP() << missing;
    network_ = std::make_unique<VethNetwork>();
  }

  size_t add_host() {
    addresses_.push_back(network_->add());
    return addresses_.size() - 1;
  }
  std::unique_ptr<XdpPort> open(size_t host, XskCopies copies = XskCopies::if_needed) {
    std::unique_ptr<XdpPort> port;
    network_->in_host(host, [&] { port = open_xdp({.udp = {.address = addresses_[host]}, .copies = copies}); });
    return port;
  }
  // Bound to the host's address and this port (0: one that the kernel chooses).
  lightcc::Fd udp_socket(size_t host, uint16_t port, const char* device = "") {
    lightcc::Fd made;
    network_->in_host(host, [&] { made = lightcc::Fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)); });
    EXPECT_EQ(setsockopt(made.get(), SOL_SOCKET, SO_BINDTODEVICE, device, socklen_t(std::strlen(device))), 0);
    sockaddr_in ip{};
    ip.sin_family = AF_INET;
    ip.sin_port = htons(port);
    inet_pton(AF_INET, addresses_[host].c_str(), &ip.sin_addr);
    EXPECT_EQ(bind(made.get(), reinterpret_cast<const sockaddr*>(&ip), sizeof ip), 0);
    return made;
  }
  lightcc::Fd udp_socket(size_t host) { return udp_socket(host, next_port_++); }
  // Until packets of `from` have come to `to` that the kernel did not send.
  void find_each_other(XdpPort& from, XdpPort& to) {
    const uint64_t before = from.counters().sent;
    const auto deadline = contract::Clock::now() + contract::kPatience;
    for (bool came = false; !came && contract::Clock::now() < deadline;) {
      from.tx(std::array{contract::make(to.caps().address, 0, nullptr, 0)});
      came = take(to) > 0 && from.counters().sent > before;
    }
    ASSERT_GT(from.counters().sent, before);
    usleep(20'000);  // what is on the way arrives
    for (int i = 0; i < 200; ++i) take(to);
  }
  // How many packets have come.
  static size_t take(Port& port) {
    std::array<RxPacket, 64> got;
    const size_t count = port.rx(got, {});
    port.release(std::span(got).first(count));
    return count;
  }
  // All of `count` packets; how many have come. On the way are no more than have come, but one, as the kernel holds few
  // while it asks for the receiver's MAC address, nor more than the receiver or a queue on the way holds.
  static size_t send_all(Port& from, Port& to, uint32_t count, uint32_t bytes) {
    const std::vector<uint8_t> data(bytes);
    size_t came = 0;
    const auto deadline = contract::Clock::now() + contract::kPatience;
    for (uint32_t sent = 0; came < count && contract::Clock::now() < deadline;) {
      if (sent < count && sent - came < std::min<size_t>({came + 1, to.caps().receive_packets, kOnTheWay}))
        sent += static_cast<uint32_t>(from.tx(std::array{contract::make(to.caps().address, sent, data.data(), bytes)}));
      else
        from.rx({}, {});
      came += take(to);
    }
    return came;
  }

  std::unique_ptr<VethNetwork> network_;
  std::vector<std::string> addresses_;
  uint16_t next_port_ = 5000;
};

}  // namespace harp
