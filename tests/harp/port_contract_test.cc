#include "contracts/port_contract.h"
#include "harp/veth.h"

#include <atomic>
#include <numeric>
#include <random>

#include "harp/faulty.h"
#include "harp_plugin/port/mem.h"
#include "harp_plugin/port/shm.h"
#include "harp_plugin/port/udp.h"
#include "harp_plugin/port/xdp.h"
#include "labels.h"

LABEL(alone, "*/xdp*");

namespace harp {

using contract::Clock;
using contract::kPatience;
using contract::make;
using contract::number_of;

TEST_P(PortContract, CapsMakeSense) {
  const auto port = open();
  const Caps& caps = port->caps();
  EXPECT_FALSE(caps.name.empty());
  EXPECT_GE(caps.payload, 1024u);
  EXPECT_EQ(caps.payload % kOffsetUnit, 0u);
  EXPECT_GE(caps.receive_packets, 1u);
  EXPECT_GE(caps.locals, 1);
  EXPECT_GT(caps.address.size, 0);
  EXPECT_EQ(port->tx_done(), 0u);
}

TEST_P(PortContract, EverySizeArrivesAsItWasSent) {
  const uint8_t* data = memory(1 << 17);
  const auto a = open();
  const auto b = open();
  const uint32_t full = a->caps().payload;
  for (const bool tagged : {false, true}) {
    std::vector<TxPacket> packets;
    for (const uint32_t bytes : {0u, 1u, 15u, 16u, 17u, 255u, 256u, 257u, 300u, 1000u, full - 1, full}) {
      const auto number = static_cast<uint32_t>(packets.size());
      packets.push_back(make(b->caps().address, number, data + 13 * number, bytes, tagged));
    }
    deliver(*a, *b, packets);
  }
}

TEST_P(PortContract, ControlPacketsCarryTheirBodyInTheHead) {
  const auto a = open();
  const auto b = open();
  std::vector<TxPacket> packets;
  for (const bool tagged : {false, true}) {
    packets.push_back(make(b->caps().address, static_cast<uint32_t>(packets.size()), nullptr, 0, tagged));
    packets.back().head_bytes = kMostControlBytes;
    for (size_t i = kHeaderBytes; i < kMostControlBytes; ++i) packets.back().head[i] = contract::pattern(5, i);
  }
  const auto deadline = Clock::now() + kPatience;
  size_t came = 0;
  while (came < 2 && Clock::now() < deadline) {
    a->tx(packets);
    pump(*b, [&](const RxPacket& packet) {
      EXPECT_EQ(contract::bytes_of(packet), contract::bytes_of(packets.at(number_of(packet))));
      ++came;
    });
    pump(*a, [](const RxPacket&) {});
  }
  EXPECT_GE(came, 2u);
}

TEST_P(PortContract, AQuietPortKeepsTheOrder) {
  const uint8_t* data = memory(1 << 17);
  const auto a = open();
  const auto b = open();
  deliver(*a, *b, {make(b->caps().address, 0, data, 100)});  // the first ones may be lost while they find each other
  const uint32_t burst = std::min(a->caps().receive_packets, 48u);
  for (int round = 0; round < 20; ++round) {
    std::vector<TxPacket> packets;
    for (uint32_t i = 0; i < burst; ++i) packets.push_back(make(b->caps().address, i, data + i, 1 + i * 20));
    std::vector<uint32_t> expected(packets.size());
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(deliver(*a, *b, packets), expected);
  }
}

TEST_P(PortContract, AnswersGoToWhereAPacketCameFrom) {
  const uint8_t* data = memory(4096);
  const auto a = open();
  const auto b = open();
  deliver(*a, *b, {make(b->caps().address, 0, data, 64)});
  Address from;
  std::vector<TxPacket> again{make(b->caps().address, 0, data, 64)};
  const auto deadline = Clock::now() + kPatience;
  while (from.size == 0 && Clock::now() < deadline) {
    a->tx(again);
    pump(*b, [&](const RxPacket& packet) { from = packet.from; });
    pump(*a, [](const RxPacket&) {});
  }
  ASSERT_GT(from.size, 0);
  deliver(*b, *a, {make(from, 0, data + 9, 64)});
}

TEST_P(PortContract, APortReachesItself) {
  const uint8_t* data = memory(4096);
  const auto a = open();
  deliver(*a, *a, {make(a->caps().address, 0, data, 1000), make(a->caps().address, 1, data, 0)});
}

TEST_P(PortContract, LongTrafficReusesEverythingAndIsLetGo) {
  const uint8_t* data = memory(1 << 17);
  const auto a = open();
  const auto b = open();
  const uint32_t window = std::min(a->caps().receive_packets, 32u);
  uint64_t taken = 0;
  uint64_t wrong = 0;
  uint64_t came = 0;
  std::minstd_rand random(3);
  const auto deadline = Clock::now() + kPatience;
  while (came < 10'000 && Clock::now() < deadline) {
    std::vector<TxPacket> packets;
    for (uint32_t i = 0; i < window; ++i) {
      const uint32_t offset = random() % 4096;
      packets.push_back(make(b->caps().address, offset, data + offset, random() % 1200, random() % 2));
    }
    taken += a->tx(packets);
    pump(*b, [&](const RxPacket& packet) {
      const uint8_t* sent = data + number_of(packet);
      const uint32_t total = read_header(std::span(packet.head, packet.head_bytes))->total;
      wrong += packet.payload_bytes < total || std::memcmp(packet.payload, sent, total) != 0;
      ++came;
    });
    pump(*a, [](const RxPacket&) {});
  }
  EXPECT_GE(came, 10'000u);
  EXPECT_EQ(wrong, 0u);
  settle(*a, taken, [&] { pump(*b, [](const RxPacket&) {}); });
}

// Streams lend frames for long: what is lent must not change, and must not keep others from passing.
TEST_P(PortContract, LentPacketsStayAsTheyAreAndGoBackInAnyOrder) {
  const uint8_t* data = memory(1 << 17);
  const auto a = open();
  const auto b = open();
  deliver(*a, *b, {make(b->caps().address, 0, data, 100)});
  const uint32_t lend = std::min(a->caps().receive_packets, 24u);
  std::vector<TxPacket> packets;
  for (uint32_t i = 0; i < lend; ++i) packets.push_back(make(b->caps().address, i, data + 31 * i, 900 + i, i % 3 == 0));
  std::vector<RxPacket> kept;
  std::vector<bool> seen(lend);
  uint64_t taken = 0;
  auto deadline = Clock::now() + kPatience;
  while (kept.size() < lend && Clock::now() < deadline) {
    for (uint32_t i = 0; i < lend; ++i) {
      if (!seen[i]) a->tx(std::span(packets).subspan(i, 1));
    }
    std::array<RxPacket, 64> got;
    const size_t count = b->rx(got, {});
    for (size_t i = 0; i < count; ++i) {
      const uint32_t number = number_of(got[i]);
      if (seen[number] || contract::bytes_of(got[i]) != contract::bytes_of(packets[number])) {  // deliver()'s, late
        b->release(std::span(got).subspan(i, 1));
        continue;
      }
      seen[number] = true;
      kept.push_back(got[i]);
    }
    pump(*a, [](const RxPacket&) {});
  }
  ASSERT_EQ(kept.size(), lend);
  for (int round = 0; round < 100; ++round) {  // others pass
    std::vector<TxPacket> more;
    for (uint32_t i = 0; i < 16; ++i) more.push_back(make(b->caps().address, i, data + 5000 + i, 700));
    deliver(*a, *b, more);
  }
  std::shuffle(kept.begin(), kept.end(), std::minstd_rand(4));
  for (const RxPacket& packet : kept) {
    EXPECT_EQ(contract::bytes_of(packet), contract::bytes_of(packets[number_of(packet)]));
    b->release(std::span(&packet, 1));
  }
  const auto before = a->tx_done();
  taken = a->tx(packets);
  EXPECT_GT(taken, 0u);
  deadline = Clock::now() + kPatience;
  while (a->tx_done() < before + taken && Clock::now() < deadline) pump(*b, [](const RxPacket&) {});
  EXPECT_GE(a->tx_done(), before + taken);
}

TEST_P(PortContract, AnAddressThatDoesNotExistLosesPacketsAndBlocksNobody) {
  const uint8_t* data = memory(1 << 17);
  const auto a = open();
  const auto b = open();
  Address nobody;
  {
    const auto closed = open();
    nobody = closed->caps().address;
  }
  uint64_t taken = 0;
  const auto deadline = Clock::now() + kPatience;
  while (taken < 500 && Clock::now() < deadline) {
    taken += a->tx(std::array{make(nobody, 0, data, a->caps().payload)});
    pump(*a, [](const RxPacket&) {});
  }
  ASSERT_EQ(taken, 500u) << "refused for too long";
  settle(*a, taken, [&] { pump(*a, [](const RxPacket&) {}); });
  deliver(*a, *b, {make(b->caps().address, 0, data, 1000)});
}

TEST_P(PortContract, TheDoorbellRingsAndIsQuietOtherwise) {
  const uint8_t* data = memory(4096);
  const auto a = open();
  const auto b = open();
  if (b->descriptor() < 0) GTEST_SKIP() << "no doorbell";
  deliver(*a, *b, {make(b->caps().address, 0, data, 100)});
  usleep(20'000);  // it may have been sent several times
  for (int i = 0; i < 50; ++i) pump(*b, [](const RxPacket&) {});
  ASSERT_TRUE(b->arm());
  pollfd waiter{b->descriptor(), POLLIN, 0};
  EXPECT_EQ(poll(&waiter, 1, 20), 0);
  a->tx(std::array{make(b->caps().address, 0, data, 100)});
  EXPECT_EQ(poll(&waiter, 1, 5000), 1);
  b->disarm();
  size_t came = 0;
  const auto deadline = Clock::now() + kPatience;
  while (came == 0 && Clock::now() < deadline) pump(*b, [&](const RxPacket&) { ++came; });
  EXPECT_GE(came, 1u);
  a->tx(std::array{make(b->caps().address, 0, data, 100)});
  const auto armed_by = Clock::now() + kPatience;
  while (b->arm() && Clock::now() < armed_by) b->disarm();
  EXPECT_LT(Clock::now(), armed_by) << "arm() does not see the packet that is there";
}

// Two threads play ping-pong, and each sleeps before every packet: a lost wake-up ends in the poll's time-out.
TEST_P(PortContract, NoWakeUpIsLost) {
  const uint8_t* data = memory(4096);
  const auto a = open();
  const auto b = open();
  if (b->descriptor() < 0) GTEST_SKIP() << "no doorbell";
  deliver(*a, *b, {make(b->caps().address, 0, data, 100)});
  deliver(*b, *a, {make(a->caps().address, 0, data, 100)});
  constexpr uint32_t kRounds = 2000;
  std::atomic<int> late{0};
  const auto play = [&](Port& port, const Address& other, bool serves) {
    if (serves) port.tx(std::array{make(other, 1, data, 100)});
    for (uint32_t round = 1; round <= kRounds && late == 0;) {
      if (port.arm()) {
        pollfd waiter{port.descriptor(), POLLIN, 0};
        if (poll(&waiter, 1, 10'000) == 0) ++late;
      }
      port.disarm();
      pump(port, [&](const RxPacket& packet) {
        if (number_of(packet) != round) return;  // sent a second time while they found each other
        ++round;
        if (!serves || round <= kRounds) port.tx(std::array{make(other, serves ? round : round - 1, data, 100)});
      });
    }
  };
  std::thread server([&] { play(*a, b->caps().address, true); });
  play(*b, a->caps().address, false);
  server.join();
  EXPECT_EQ(late, 0);
}

TEST_P(PortContract, ClosingTheReceiverLetsGoOfEverything) {
  const uint8_t* data = memory(1 << 17);
  const auto a = open();
  auto b = open();
  auto c = open();
  deliver(*a, *b, {make(b->caps().address, 0, data, 100)});
  const Address address = b->caps().address;
  uint64_t taken = 1000;  // more than can be under way
  std::vector<TxPacket> packets;
  for (uint32_t i = 0; i < 32; ++i) packets.push_back(make(address, i, data + i, a->caps().payload));
  taken = a->tx_done() + a->tx(packets);
  std::array<RxPacket, 8> lent;
  b->rx(lent, {});
  b.reset();
  settle(*a, taken, [&] { pump(*a, [](const RxPacket&) {}); });
  taken += a->tx(packets);
  settle(*a, taken, [&] { pump(*a, [](const RxPacket&) {}); });
  deliver(*a, *c, {make(c->caps().address, 0, data, 1000)});
}

TEST_P(PortContract, ClosingTheSenderWhileItSends) {
  const uint8_t* data = memory(1 << 17);
  const auto b = open();
  const int rounds = GetParam().missing ? 4 : 20;  // a host each
  for (int round = 0; round < rounds; ++round) {
    std::atomic<bool> stop{false};
    std::thread sender([&] {
      const auto a = open();
      std::vector<TxPacket> packets;
      for (uint32_t i = 0; i < 32; ++i) packets.push_back(make(b->caps().address, i, data + i, 1000));
      for (int i = 0; i < 50; ++i) {
        a->tx(packets);
        pump(*a, [](const RxPacket&) {});
      }
    });
    std::thread closer([&] {
      sender.join();
      stop = true;
    });
    while (!stop) {
      pump(*b, [&](const RxPacket& packet) {
        EXPECT_EQ(packet.payload_bytes, 1000u);
        EXPECT_EQ(std::memcmp(packet.payload, data + number_of(packet), 1000), 0);
      });
    }
    closer.join();
  }
  const auto c = open();
  deliver(*c, *b, {make(b->caps().address, 0, data, 1000)});
}

TEST_P(PortContract, ManyPeersAreToldApart) {
  const uint8_t* data = memory(4096);
  const auto hub = open();
  std::vector<std::unique_ptr<Port>> peers;
  for (int i = 0; i < 24; ++i) peers.push_back(open());
  for (int round = 0; round < 3; ++round) {
    for (const auto& peer : peers) {
      deliver(*hub, *peer, {make(peer->caps().address, 0, data, 500), make(peer->caps().address, 1, data, 0)});
      deliver(*peer, *hub, {make(hub->caps().address, 0, data + 3, 500)});
    }
  }
  std::vector<TxPacket> mixed;  // one batch to all
  for (const auto& peer : peers) mixed.push_back(make(peer->caps().address, 7, data, 300));
  std::vector<bool> came(peers.size());
  const auto deadline = Clock::now() + kPatience;
  while (std::find(came.begin(), came.end(), false) != came.end() && Clock::now() < deadline) {
    hub->tx(mixed);
    for (size_t i = 0; i < peers.size(); ++i) {
      pump(*peers[i], [&](const RxPacket& packet) { came[i] = came[i] || number_of(packet) == 7; });
    }
    pump(*hub, [](const RxPacket&) {});
  }
  EXPECT_EQ(std::count(came.begin(), came.end(), true), static_cast<long>(peers.size()));
}

namespace {

OpenPort mem_network() {
  return [network = make_mem_network()] { return open_mem(network, 1440); };
}
OpenPort large_mem_network() {
  return [network = make_mem_network()] { return open_mem(network, 8944); };
}
// Around each port of a network, without faults.
template <OpenPort (*network)()>
OpenPort faultless() {
  return [open = network()] { return open_faulty(open(), Faults{}, [] { return uint64_t{0}; }); };
}
OpenPort udp_network(int locals, bool combine) {
  return [=] {
    return open_udp({.address = "127.0.0.1", .locals = locals, .mtu = 1500, .gso = combine, .gro = combine});
  };
}
OpenPort shm_network() { return [] { return open_shm(); }; }

// Each port on a host of its own.
template <int Mtu, int Queues>
OpenPort xdp_network() {
  return [network = std::make_shared<VethNetwork>(Mtu, Queues), hosts = 0]() mutable -> std::unique_ptr<Port> {
    std::unique_ptr<Port> port;
    const std::string address = network->add();
    network->in_host(static_cast<size_t>(hosts++), [&] {
      port = open_xdp({.udp = {.address = address, .tags = true}});
    });
    return port;
  };
}

}  // namespace

INSTANTIATE_TEST_SUITE_P(Ports, PortContract,
                         testing::Values(PortKind{"udp", [] { return udp_network(1, true); }},
                                         PortKind{"udp_two_sockets", [] { return udp_network(2, true); }},
                                         PortKind{"udp_packets_alone", [] { return udp_network(1, false); }},
                                         PortKind{"xdp", xdp_network<1500, 1>, false, VethNetwork::missing},
                                         PortKind{"xdp_9000", xdp_network<9000, 2>, false, VethNetwork::missing},
                                         PortKind{"mem_1440", mem_network}, PortKind{"mem_8944", large_mem_network},
                                         PortKind{"shm", shm_network}, PortKind{"shm_regions", shm_network, true},
                                         PortKind{"faulty_mem", faultless<mem_network>},
                                         PortKind{"faulty_shm", faultless<shm_network>}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace harp
