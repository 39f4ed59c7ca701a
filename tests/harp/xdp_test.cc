// The port xdp beyond what every port does (port_contract_test.cc): what goes past the kernel and what does not, and
// what it leaves behind.
#include "harp_plugin/port/xdp.h"

#include <arpa/inet.h>
#include <sys/wait.h>

#include "base/error.h"
#include "harp/xdp_hosts.h"
#include "harp_plugin/port/udp.h"
#include "harp_plugin/port/xdp_frame.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using contract::Clock;
using contract::kPatience;
using contract::make;

class Xdp : public XdpHosts {};

TEST_F(Xdp, PacketsPassTheKernelOnBothSides) {
  const auto a = open(add_host()), b = open(add_host());
  find_each_other(*a, *b);
  const XdpCounters before_a = a->counters(), before_b = b->counters();
  EXPECT_EQ(send_all(*a, *b, 5000, 1400), 5000u);
  EXPECT_EQ(a->counters().sent - before_a.sent, 5000u);
  EXPECT_EQ(b->counters().received - before_b.received, 5000u);
  EXPECT_EQ(b->counters().received_by_kernel, before_b.received_by_kernel);
}

TEST_F(Xdp, APortOfTheKernelAndOneOfAfXdpReachEachOther) {
  const auto xdp = open(add_host());
  std::unique_ptr<UdpPort> udp;
  network_->in_host(add_host(), [&] { udp = open_udp({.address = addresses_[1]}); });
  EXPECT_EQ(send_all(*xdp, *udp, 300, 1000), 300u);
  EXPECT_EQ(send_all(*udp, *xdp, 300, 1000), 300u);
}

TEST_F(Xdp, WhatIsNotToItStaysTheKernels) {
  const auto port = open(add_host());
  add_host();
  const lightcc::Fd receiver = udp_socket(0), sender = udp_socket(1);
  sockaddr_in to{};
  socklen_t length = sizeof to;
  getsockname(receiver.get(), reinterpret_cast<sockaddr*>(&to), &length);
  const std::vector<char> fragmented(20'000, 'x');
  for (const size_t bytes : {size_t{10}, fragmented.size()}) {
    ASSERT_EQ(sendto(sender.get(), fragmented.data(), bytes, 0, reinterpret_cast<const sockaddr*>(&to), sizeof to),
              static_cast<ssize_t>(bytes));
    std::vector<char> got(30'000);
    pollfd waiter{receiver.get(), POLLIN, 0};
    ASSERT_EQ(poll(&waiter, 1, 5000), 1) << bytes << " bytes";
    EXPECT_EQ(recv(receiver.get(), got.data(), got.size(), 0), static_cast<ssize_t>(bytes));
  }
  EXPECT_EQ(port->counters().received, 0u);
}

TEST_F(Xdp, AnInterfaceHasOneAndItsEndLeavesNothing) {
  const size_t host = add_host(), other = add_host();
  const auto peer = open(other);
  for (int round = 0; round < 5; ++round) {
    const auto first = open(host);
    network_->run_in_host(host, "ip link show dev eth0 | grep -q xdp");
    try {
      open(host);
      FAIL() << "a second one was opened";
    } catch (const lightcc::Error& error) {
      EXPECT_NE(std::string(error.what()).find("eth0, which has one already"), std::string::npos) << error.what();
    }
    find_each_other(*first, *peer);
  }
  network_->run_in_host(host, "! ip link show dev eth0 | grep -q xdp");
}

TEST_F(Xdp, AForkedChildKeepsNothing) {
  const size_t host = add_host();
  auto port = open(host);
  const pid_t child = fork();
  if (child == 0) {
    sleep(60);
    _exit(0);
  }
  port.reset();
  network_->run_in_host(host, "! ip link show dev eth0 | grep -q xdp");
  open(host);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_F(Xdp, ALinkThatIsDownWakesNobody) {
  const auto a = open(add_host()), b = open(add_host());
  find_each_other(*a, *b);
  network_->run_in_host(0, "ip link set eth0 down");
  for (int i = 0; i < 100; ++i) a->tx(std::array{make(b->caps().address, 0, nullptr, 0)});
  take(*a);
  EXPECT_TRUE(a->arm()) << "it has to sleep";
  a->disarm();
  network_->run_in_host(0, "ip link set eth0 up");
  find_each_other(*a, *b);
}

TEST_F(Xdp, WithoutPrivilegesItSaysWhatItNeeds) {
  const size_t host = add_host();
  try {
    network_->in_host_as(65534, host, [&] { open_xdp({.udp = {.address = addresses_[host]}}); });
    FAIL() << "it was opened";
  } catch (const lightcc::Error& error) {
    EXPECT_NE(std::string(error.what()).find("CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF"), std::string::npos)
        << error.what();
  }
}

TEST_F(Xdp, ADriverThatHasToCopyIsRefusedWhereItMustNot) {
  const size_t host = add_host();
  try {
    open(host, XskCopies::never);
    FAIL() << "veth copies";
  } catch (const lightcc::Error& error) {
    EXPECT_NE(std::string(error.what()).find("queue 0 of eth0"), std::string::npos) << error.what();
  }
  network_->run_in_host(host, "! ip link show dev eth0 | grep -q xdp");
  open(host, XskCopies::always);
}

// Its address moves to another machine, which the kernel learns by ARP.
TEST_F(Xdp, ANewEthernetAddressOfThePeerIsFollowed) {
  const auto a = open(add_host()), b = open(add_host());
  find_each_other(*a, *b);
  network_->run_in_host(1, "ip link set eth0 address 02:00:00:00:00:77");
  network_->run_in_host(0, "ip neighbor flush dev eth0");
  const auto deadline = Clock::now() + kPatience;
  size_t came = 0;
  while (came < 100 && Clock::now() < deadline) {
    a->tx(std::array{make(b->caps().address, 0, nullptr, 0)});
    came += take(*b);
  }
  EXPECT_GE(came, 100u);
  find_each_other(*a, *b);
}

TEST_F(Xdp, PeersBehindARouterAreReached) {
  for (int i = 0; i < 3; ++i) add_host();  // 0 - 1, the router - 2
  network_->run_in_host(1, "ip address add 10.8.0.1/16 dev eth0 && echo 1 >/proc/sys/net/ipv4/ip_forward");
  network_->run_in_host(2, "ip address flush dev eth0 && ip address add 10.8.0.3/16 dev eth0 && "
                           "ip route add default via 10.8.0.1");
  network_->run_in_host(0, "ip route add 10.8.0.0/16 via " + addresses_[1]);
  addresses_[2] = "10.8.0.3";
  const auto a = open(0), c = open(2);
  find_each_other(*a, *c);
  find_each_other(*c, *a);
}

TEST(XdpFrame, IsReadAsItIsWritten) {
  sockaddr_in own{}, peer{};
  own.sin_family = peer.sin_family = AF_INET;
  own.sin_addr.s_addr = htonl(0x0a090001);
  own.sin_port = htons(40001);
  peer.sin_addr.s_addr = htonl(0x0a090002);
  peer.sin_port = htons(40002);
  const FrameHeaders headers({1, 2, 3, 4, 5, 6}, {7, 8, 9, 10, 11, 12}, own.sin_addr.s_addr, peer);
  std::vector<uint8_t> frame(kFrameHeaders + kHeaderBytes + 100, 5);
  const auto first = headers.with(own.sin_port, kHeaderBytes + 100);
  std::copy(first.begin(), first.end(), frame.begin());

  uint32_t sum = 0;  // with its checksum the header's words add up to 0xffff
  for (size_t at = kEthernetBytes; at < kEthernetBytes + kIpBytes; at += 2) sum += frame[at] << 8 | frame[at + 1];
  EXPECT_EQ((sum & 0xffff) + (sum >> 16), 0xffffu);

  const std::array locals = {own, peer};
  const auto packet = read_frame(frame, locals);
  ASSERT_TRUE(packet);
  EXPECT_EQ(packet->local, 1);
  EXPECT_EQ(packet->head, frame.data() + kFrameHeaders);
  EXPECT_EQ(packet->payload_bytes, 100u);
  EXPECT_EQ(std::memcmp(packet->from.bytes.data(), &own, sizeof own), 0);

  EXPECT_FALSE(read_frame(frame, std::span(locals).first(1))) << "to another port";
  for (size_t bytes = 0; bytes < frame.size(); ++bytes) EXPECT_FALSE(read_frame(std::span(frame).first(bytes), locals));
  frame[kAtUdpLength + 1] = kUdpBytes + kHeaderBytes - 1;
  EXPECT_FALSE(read_frame(frame, locals)) << "shorter than HARP's header";
  frame[kAtUdpLength + 1] = kUdpBytes + kHeaderBytes;
  EXPECT_EQ(read_frame(frame, locals)->payload_bytes, 0u) << "padded by Ethernet";
}

}  // namespace
}  // namespace harp
