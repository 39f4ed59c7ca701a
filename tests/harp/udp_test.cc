// The port udp beyond what every port does (port_contract_test.cc): sizes, groups, sockets, frames and descriptors. On
// 127.0.0.1; what is received in detail is in udp_receive_test.cc.
#include "harp_plugin/port/udp.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <random>

#include "base/error.h"
#include "harp/udp_transfer.h"
#include "harp/veth.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using contract::bytes_of;
using contract::number_of;
using contract::pattern;

class Udp : public UdpTest {};

INSTANTIATE_TEST_SUITE_P(Ways, Udp, testing::Bool(), [](const auto& way) { return way.param ? "Combined" : "Alone"; });

std::vector<int> open_descriptors() {
  std::vector<int> all;
  DIR* directory = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(directory))
    if (entry->d_name[0] != '.' && std::atoi(entry->d_name) != dirfd(directory))
      all.push_back(std::atoi(entry->d_name));
  closedir(directory);
  return all;
}

TEST(UdpCaps, PayloadIsWhatTheMtuLeaves) {
  const auto payload = [](uint32_t mtu, bool tags) {
    return open_udp({.address = "127.0.0.1", .mtu = mtu, .tags = tags})->caps().payload;
  };
  EXPECT_EQ(payload(1500, false), 1440u);
  EXPECT_EQ(payload(1500, true), 1440u);
  EXPECT_EQ(payload(9000, false), 8944u);
  EXPECT_EQ(payload(9000, true), 8928u);
  EXPECT_EQ(payload(576, true), 512u);
  EXPECT_GT(payload(0, false), 1440u) << "the loopback's own";
  EXPECT_THROW(payload(575, false), lightcc::Error);
  EXPECT_THROW(open_udp({.address = "127.0.0.1", .locals = 0}), lightcc::Error);
  EXPECT_THROW(open_udp({.address = "192.0.2.1"}), lightcc::Error);
}

TEST(UdpPorts, OnlyThoseOfTheRangeAreUsed) {
  // Three in a row that are free now; somebody may be faster, then others are tried.
  for (uint16_t first = 23000; first < 30000; first += 3) {
    const UdpOptions options{.address = "127.0.0.1", .first_port = first, .last_port = uint16_t(first + 2)};
    std::vector<std::unique_ptr<UdpPort>> ports;
    try {
      while (ports.size() < 4) ports.push_back(open_udp(options));
    } catch (const lightcc::Error& error) {
      EXPECT_NE(std::string(error.what()).find("ports " + std::to_string(first)), std::string::npos) << error.what();
    }
    ASSERT_LT(ports.size(), 4u);
    for (const auto& port : ports) {
      sockaddr_in ip;
      std::memcpy(&ip, port->caps().address.bytes.data(), sizeof ip);
      EXPECT_GE(ntohs(ip.sin_port), first);
      EXPECT_LE(ntohs(ip.sin_port), first + 2);
    }
    if (ports.size() == 3) return;
  }
  FAIL() << "no three ports in a row are free";
}

// The sender may have so many on the way: none is lost, though nobody reads.
TEST(UdpCaps, SoManyPacketsAreHeldUnread) {
  for (const uint32_t mtu : {1500u, 9000u}) {
    for (const bool combine : {false, true}) {
      const auto a = open_on_loopback(combine, 1, mtu);
      const auto b = open_on_loopback(combine, 1, mtu);
      const uint32_t count = b->caps().receive_packets;
      const std::vector<uint8_t> data(b->caps().payload);
      for (int round = 0; round < 3; ++round) {
        for (uint32_t i = 0; i < count; ++i)
          send(*a, std::array{contract::make(b->caps().address, i, data.data(), b->caps().payload)});
        uint32_t came = 0;
        std::array<RxPacket, 64> got;
        while (const size_t n = b->rx(got, {})) {
          came += static_cast<uint32_t>(n);
          b->release(std::span(got).first(n));
        }
        EXPECT_EQ(came, count) << mtu << (combine ? " combined" : " alone");
      }
    }
  }
}

TEST_P(Udp, PacketsOfMixedSizesToSeveralPlacesStayApartAndInOrder) {
  const auto a = open();
  const std::unique_ptr<UdpPort> places[] = {open(), open()};
  std::vector<uint8_t> data(1 << 16);
  for (size_t i = 0; i < data.size(); ++i) data[i] = pattern(3, i);
  std::minstd_rand random(7);
  std::vector<TxPacket> packets;
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t sizes[] = {kFull, kFull, kFull, 0, 1, 15, 16, 17, kFull - 1};
    const Address& to = places[i / 16 % 2]->caps().address;  // long runs to one place, then another
    packets.push_back(contract::make(to, i, data.data() + 100 * i, sizes[random() % 9], random() % 8 == 0));
  }
  send(*a, packets);
  for (const int place : {0, 1}) {
    const std::vector<RxPacket> got = receive(*places[place], 32);
    ASSERT_EQ(got.size(), 32u);
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t number = i / 16 * 32 + static_cast<uint32_t>(place) * 16 + i % 16;
      EXPECT_EQ(bytes_of(got[i]), bytes_of(packets[number])) << number;
    }
    places[place]->release(got);
  }
  EXPECT_EQ(a->tx_done(), 64u);
  EXPECT_EQ(a->counters().sent_groups > 0, GetParam());
}

TEST_P(Udp, ReleaseInAnyOrderAndRecoveryFromAnEmptyPool) {
  const auto a = open();
  const auto b = open();
  std::vector<uint8_t> data(kFull);
  std::minstd_rand random(5);
  size_t held_before = 0;
  for (int round = 0; round < 3; ++round) {
    std::vector<RxPacket> held;
    std::array<RxPacket, 64> got;
    uint32_t sent = 0;
    bool lendable = true;
    for (bool empty = false; !empty;) {
      ASSERT_LT(sent, 10'000u) << "the pool has no end";
      std::vector<TxPacket> packets;
      for (uint32_t i = 0; i < 16; ++i)
        packets.push_back(contract::make(b->caps().address, sent + i, data.data(), 100));
      send(*a, packets);
      sent += 16;
      const size_t before = held.size();
      for (size_t n = 1; n > 0; held.insert(held.end(), got.begin(), got.begin() + static_cast<long>(n)))
        n = b->rx(got, {});
      empty = held.size() - before < 16;
      if (!held.empty()) lendable = held.back().lendable;
    }
    EXPECT_FALSE(lendable) << "a port that is short says so";
    EXPECT_GE(held.size(), 48u);
    EXPECT_TRUE(round == 0 || held.size() == held_before) << "frames were lost: " << held.size();
    held_before = held.size();
    EXPECT_FALSE(b->arm()) << "more packets are there";
    for (size_t i = 0; i < held.size(); ++i) EXPECT_EQ(number_of(held[i]), i);
    std::shuffle(held.begin(), held.end(), random);
    for (const RxPacket& packet : held) b->release(std::span(&packet, 1));
    const std::vector<RxPacket> rest = receive(*b, sent - held.size());
    EXPECT_EQ(rest.size(), sent - held.size());
    b->release(rest);
  }
}

TEST_P(Udp, EachSocketIsHeardAndSaysWhichItIs) {
  constexpr int kLocals = 3;
  const auto a = open(kLocals);
  const auto b = open();
  std::vector<uint8_t> data(kFull);
  std::vector<Address> addresses;
  for (uint16_t local = 0; local < kLocals; ++local) {
    TxPacket packet = contract::make(b->caps().address, local, data.data(), 10);
    packet.local = local;
    send(*a, std::array{packet});
    const std::vector<RxPacket> got = receive(*b, 1);
    ASSERT_EQ(got.size(), 1u);
    addresses.push_back(got[0].from);
    b->release(got);
  }
  EXPECT_EQ(addresses[0], a->caps().address);
  for (uint16_t local = 0; local < kLocals; ++local) {
    ASSERT_TRUE(a->arm()) << local;
    pollfd waiter{a->descriptor(), POLLIN, 0};
    EXPECT_EQ(poll(&waiter, 1, 0), 0);
    send(*b, std::array{contract::make(addresses[local], local, data.data(), 20)});
    EXPECT_EQ(poll(&waiter, 1, 10'000), 1) << local;
    a->disarm();
    const std::vector<RxPacket> got = receive(*a, 1);
    ASSERT_EQ(got.size(), 1u);
    EXPECT_EQ(got[0].local, local);
    EXPECT_EQ(number_of(got[0]), local);
    a->release(got);
  }
  // One socket is never empty; the others are heard all the same.
  for (uint16_t quiet = 1; quiet < kLocals; ++quiet) {
    send(*b, std::array{contract::make(addresses[quiet], 1000, data.data(), 20)});
    bool heard = false;
    for (int round = 0; round < 200 && !heard; ++round) {
      send(*b, std::array{contract::make(addresses[0], 1, data.data(), 20),
                          contract::make(addresses[0], 2, data.data(), 30)});
      std::array<RxPacket, 1> got;
      const size_t n = a->rx(got, {});
      heard = n == 1 && got[0].local == quiet;
      a->release(std::span(got).first(n));
    }
    EXPECT_TRUE(heard) << quiet;
  }
}

// What cannot be sent is lost and counted; it is no reason to send the others one by one.
TEST_P(Udp, PacketsThatCannotBeSentAreLost) {
  const auto a = open();
  const auto b = open();
  const std::vector<uint8_t> data(66'000);
  Address no_port = b->caps().address, elsewhere = b->caps().address, not_ip = b->caps().address;
  sockaddr_in ip;
  std::memcpy(&ip, no_port.bytes.data(), sizeof ip);
  ip.sin_port = 0;
  std::memcpy(no_port.bytes.data(), &ip, sizeof ip);
  ip.sin_port = htons(9);
  ip.sin_addr.s_addr = htonl(0xf0000001);  // 240.0.0.1: not from a socket of the loopback
  std::memcpy(elsewhere.bytes.data(), &ip, sizeof ip);
  not_ip.size = 3;
  std::vector<TxPacket> packets;
  for (const Address* to : {&no_port, &elsewhere, &not_ip})
    for (uint32_t i = 0; i < 4; ++i) packets.push_back(contract::make(*to, i, data.data(), kFull));
  packets.push_back(contract::make(b->caps().address, 0, data.data(), 65'500));  // too large
  send(*a, packets);
  EXPECT_EQ(a->tx_done(), packets.size());
  EXPECT_EQ(a->counters().unsent, packets.size());
  EXPECT_EQ(a->counters().gso, GetParam());
  send(*a, std::array{contract::make(b->caps().address, 5, data.data(), kFull)});
  const std::vector<RxPacket> got = receive(*b, 1);
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(number_of(got[0]), 5u);
  b->release(got);
}

// Packets to hosts that do not answer ARP stay in the socket's buffer for seconds.
TEST(UdpResets, DoNotTakeTheRoomOfData) {
  if (const std::string missing = VethNetwork::missing(); !missing.empty()) GTEST_SKIP() << missing;
  VethNetwork network;
  const std::string address = network.add();
  std::unique_ptr<UdpPort> port;
  network.in_host(0, [&] { port = open_udp({.address = address}); });
  const int small = 64 << 10;
  ASSERT_EQ(setsockopt(port->socket(0), SOL_SOCKET, SO_SNDBUF, &small, sizeof small), 0);
  const auto waiting = [&] {
    int bytes = 0;
    ioctl(port->socket(0), SIOCOUTQ, &bytes);
    return bytes;
  };
  for (uint8_t host = 100; host < 120; ++host) {
    sockaddr_in ip{};
    ip.sin_family = AF_INET;
    ip.sin_port = htons(4000);
    ip.sin_addr.s_addr = htonl(0x0a090000u + host);
    Address to;
    std::memcpy(to.bytes.data(), &ip, sizeof ip);
    to.size = sizeof ip;
    TxPacket reset = contract::make(to, host, nullptr, 0);
    write_header({.type = Type::reset, .conn = 1, .number = host}, reset.head.data());
    for (int i = 0; i < 10; ++i) EXPECT_EQ(port->tx(std::array{reset}), 1u);
  }
  EXPECT_GT(waiting(), 0);
  EXPECT_LT(waiting(), 2 * small / 4);
  EXPECT_GT(port->counters().unsent, 100u);
}

TEST(UdpDescriptors, NoneIsLeftBehindAndNoneIsInherited) {
  const std::vector<int> before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    const auto port = open_on_loopback(true, 3);
    for (const int fd : open_descriptors()) {
      const bool ours = std::find(before.begin(), before.end(), fd) == before.end();
      EXPECT_TRUE(!ours || fcntl(fd, F_GETFD) & FD_CLOEXEC) << fd;
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace harp
