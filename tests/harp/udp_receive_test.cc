// Where the port udp puts payloads, how it takes datagrams apart, and what strangers can send it. On 127.0.0.1.
#include <netinet/in.h>

#include <functional>
#include <thread>

#include "base/fd.h"
#include "harp/udp_transfer.h"
#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

using contract::bytes_of;
using contract::Clock;
using contract::kPatience;

class UdpReceive : public UdpTest {};

INSTANTIATE_TEST_SUITE_P(Ways, UdpReceive, testing::Bool(),
                         [](const auto& way) { return way.param ? "Combined" : "Alone"; });

// Somebody who knows the address, and nothing else.
class Stranger {
 public:
  void send(const Address& to, const std::vector<uint8_t>& bytes) {
    ASSERT_EQ(
        sendto(fd_.get(), bytes.data(), bytes.size(), 0, reinterpret_cast<const sockaddr*>(to.bytes.data()), to.size),
        static_cast<ssize_t>(bytes.size()));
  }

 private:
  lightcc::Fd fd_{socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

TEST_P(UdpReceive, ExpectedPayloadsLandInTheirPlace) {
  const auto a = open();
  const auto b = open();
  for (const uint32_t bytes : {1u, 17u, kFull, 3 * kFull + 5, 40 * kFull, 63 * kFull + 1439}) {
    Transfer transfer(bytes, 9);
    std::vector<TxPacket> packets;
    for (uint32_t i = 0; i < transfer.segments(); ++i) packets.push_back(transfer.packet(i, b->caps().address));
    const std::vector<Expected> expected = transfer.expected();
    send(*a, packets);
    const std::vector<RxPacket> got = receive(*b, packets.size(), expected);
    ASSERT_EQ(got.size(), packets.size());
    for (uint32_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].payload, transfer.place(i)) << i << " of " << bytes;
      EXPECT_EQ(bytes_of(got[i]), bytes_of(packets[i])) << i;
    }
    EXPECT_TRUE(transfer.only_places_touched());
    b->release(got);
  }
  EXPECT_EQ(b->counters().misplaced, 0u);
  EXPECT_EQ(b->counters().aggregates > 0, GetParam());
}

// Each of these comes as packet kOdd of a message; all packets have their bytes, and none lies where it does not
// belong.
TEST_P(UdpReceive, WhatIsNotExpectedIsTakenOutOfTheWay) {
  constexpr uint32_t kOdd = 3, kPackets = 8;
  using Change = std::function<void(std::vector<TxPacket>&, const Transfer&)>;
  const auto with_header = [](const std::function<void(Header&)>& change) -> Change {
    return [change](std::vector<TxPacket>& packets, const Transfer& transfer) {
      Header header = transfer.header(kOdd);
      change(header);
      write_header(header, packets[kOdd].head.data());
    };
  };
  static const std::vector<uint8_t> other(2 * kFull, 0x3c);
  const auto with_payload = [](uint32_t bytes) -> Change {
    return [bytes](std::vector<TxPacket>& packets, const Transfer&) {
      packets[kOdd].payload = other.data();
      packets[kOdd].payload_bytes = bytes;
    };
  };
  const std::pair<const char*, Change> kinds[] = {
      {"reordered", [](auto& packets, const Transfer&) { std::swap(packets[kOdd], packets[kOdd + 2]); }},
      {"lost", [](auto& packets, const Transfer&) { packets.erase(packets.begin() + kOdd); }},
      {"twice", [](auto& packets, const Transfer&) { packets.insert(packets.begin() + kOdd, packets[kOdd - 1]); }},
      {"other type", with_header([](Header& header) { header.type = Type::probe; })},
      {"flag", with_header([](Header& header) { header.flags = kStream; })},
      {"other conn", with_header([](Header& header) { ++header.conn; })},
      {"other message", with_header([](Header& header) { ++header.message; })},
      {"other offset", with_header([](Header& header) { ++header.offset; })},
      {"other total", with_header([](Header& header) { ++header.total; })},
      {"other version", [](auto& packets, const Transfer&) { packets[kOdd].head[0] ^= 0xf0; }},
      {"longer", with_payload(kFull + kTagBytes)},
      {"shorter", with_payload(kFull - 1)},
      {"much shorter", with_payload(1)},
      {"empty", with_payload(0)},
      {"tagged",
       [](auto& packets, const Transfer&) {
         packets[kOdd].tagged = true;
         packets[kOdd].tag.fill(0x77);
       }},
      {"control", [](auto& packets, const Transfer&) {
         packets[kOdd].payload_bytes = 0;
         packets[kOdd].head_bytes = 100;
         write_header({.type = Type::ack, .conn = kConn}, packets[kOdd].head.data());
         std::fill_n(packets[kOdd].head.begin() + kHeaderBytes, 100 - kHeaderBytes, 0x55);
       }}};
  const auto a = open();
  const auto b = open();
  for (const auto& [name, change] : kinds) {
    for (const uint32_t tail : {0u, 5u}) {  // the last packet is full, or not
      Transfer transfer(kPackets * kFull - tail, 4);
      std::vector<TxPacket> packets;
      for (uint32_t i = 0; i < kPackets; ++i) packets.push_back(transfer.packet(i, b->caps().address));
      change(packets, transfer);
      const std::vector<Expected> expected = transfer.expected();
      send(*a, packets);
      const std::vector<RxPacket> got = receive(*b, packets.size(), expected);
      ASSERT_EQ(got.size(), packets.size()) << name;
      for (uint32_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(bytes_of(got[i]), bytes_of(packets[i])) << name << ", packet " << i;
        EXPECT_TRUE(i >= kOdd || got[i].payload == transfer.place(i)) << name << ", packet " << i;
        EXPECT_TRUE(i != kOdd || got[i].payload != transfer.place(i)) << name << ", packet " << i;
        for (uint32_t place = 0; place < kPackets; ++place) {
          if (got[i].payload != transfer.place(place)) continue;
          const Header claimed = *read_header({got[i].head, kHeaderBytes});
          EXPECT_EQ(claimed, transfer.header(place)) << name << ", packet " << i << " claims a place";
        }
      }
      EXPECT_TRUE(transfer.only_places_touched()) << name;
      b->release(got);
    }
  }
  EXPECT_GT(b->counters().misplaced, 0u);
}

// A port that is told of payloads longer than its own does not believe it.
TEST_P(UdpReceive, ExpectationsBeyondAFullPacketAreNotUsed) {
  const auto a = open();
  const auto b = open();
  std::vector<uint8_t> target(4 * kFull, 0xa5);
  const Expected absurd{kConn, 1, 0, 4 * kFull, target.data(), 4 * kFull};
  Transfer transfer(kFull, 1);
  send(*a, std::array{transfer.packet(0, b->caps().address)});
  const std::vector<RxPacket> got = receive(*b, 1, std::span(&absurd, 1));
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(bytes_of(got[0]), bytes_of(transfer.packet(0, b->caps().address)));
  EXPECT_EQ(std::count(target.begin(), target.end(), 0xa5), static_cast<long>(target.size()));
  b->release(got);
}

TEST(UdpTags, PayloadsWithTagsAreNotPlaced) {
  const auto a = open_udp({.address = "127.0.0.1", .mtu = 1500, .tags = true});
  const auto b = open_udp({.address = "127.0.0.1", .mtu = 1500, .tags = true});
  Transfer transfer(4 * kFull, 1);
  std::vector<TxPacket> packets;
  for (uint32_t i = 0; i < 4; ++i) {
    packets.push_back(transfer.packet(i, b->caps().address));
    packets.back().tagged = true;
    packets.back().tag.fill(static_cast<uint8_t>(i));
  }
  send(*a, packets);
  const std::vector<RxPacket> got = receive(*b, 4, transfer.expected());
  ASSERT_EQ(got.size(), 4u);
  for (uint32_t i = 0; i < 4; ++i) EXPECT_EQ(bytes_of(got[i]), bytes_of(packets[i]));
  EXPECT_EQ(b->counters().placed + b->counters().misplaced, 0u);
  b->release(got);
}

// What strangers send takes no room: the port never sees it, though there is more of it than the socket holds.
TEST(UdpTags, WhatHasNotTheCookieIsDroppedByTheKernel) {
  const uint16_t cookie = cookie_of("secret");
  const auto a = open_udp({.address = "127.0.0.1", .tags = true});
  const auto b = open_udp({.address = "127.0.0.1", .tags = true, .cookie = cookie});
  const auto tagged = [&](Header header) {
    std::vector<uint8_t> bytes(kHeaderBytes + kTagBytes + 100);
    write_header(header, bytes.data());
    return bytes;
  };
  const Header right{.type = Type::probe, .flags = kTagged, .conn = kConn, .number = 7, .path = uint16_t(cookie | 3)};
  Header untagged = right, other = right, none = right;
  untagged.flags = 0;
  other.path ^= 1 << 15;
  none.path = 3;
  std::vector<uint8_t> little = tagged(right);
  little.resize(kHeaderBytes + kTagBytes - 1);
  Stranger stranger;
  for (int i = 0; i < 5000; ++i)
    for (const auto& bytes : {std::vector<uint8_t>(), tagged(untagged), tagged(other), tagged(none), little})
      stranger.send(b->caps().address, bytes);
  stranger.send(b->caps().address, tagged(right));
  const std::vector<RxPacket> got = receive(*b, 1);
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(contract::number_of(got[0]), 7u);
  EXPECT_EQ(b->counters().dropped, 0u);
  b->release(got);
}

TEST_P(UdpReceive, WhatIsNoPacketIsCountedAndDropped) {
  const auto a = open();
  const auto b = open();
  Stranger stranger;
  Transfer transfer(2 * kFull, 6);
  const std::vector<Expected> expected = transfer.expected();
  uint64_t dropped = 0;
  for (const size_t bytes : {size_t{0}, size_t{1}, kHeaderBytes - 1, kHeaderBytes + kFull + kTagBytes + 1, size_t{9000},
                             size_t{60000}, size_t{65507}}) {
    stranger.send(b->caps().address, std::vector<uint8_t>(bytes, 0xee));
    for (uint32_t i : {0u, 1u}) send(*a, std::array{transfer.packet(i, b->caps().address)});
    const std::vector<RxPacket> got = receive(*b, 2, expected);
    ASSERT_EQ(got.size(), 2u) << bytes;
    for (uint32_t i : {0u, 1u}) EXPECT_EQ(bytes_of(got[i]), bytes_of(transfer.packet(i, b->caps().address))) << bytes;
    b->release(got);
    EXPECT_EQ(b->counters().dropped, ++dropped) << bytes;
    EXPECT_TRUE(transfer.only_places_touched()) << bytes;
  }
}

// Datagrams of a group whose segments are no packets.
TEST(UdpAggregates, OfTooShortSegmentsAreDropped) {
  const auto a = open_on_loopback(true);
  const auto b = open_on_loopback(true);
  TxPacket packet = contract::make(b->caps().address, 0, nullptr, 0);
  packet.head_bytes = 5;
  send(*a, std::vector<TxPacket>(10, packet));
  Transfer transfer(kFull, 6);
  send(*a, std::array{transfer.packet(0, b->caps().address)});
  const std::vector<RxPacket> got = receive(*b, 1, transfer.expected());
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(bytes_of(got[0]), bytes_of(transfer.packet(0, b->caps().address)));
  EXPECT_EQ(b->counters().dropped, 10u);
  EXPECT_EQ(b->counters().aggregates, 1u);
  b->release(got);
}

// More packets in a datagram than the caller has room for: the rest comes later, and is not overwritten meanwhile.
TEST(UdpAggregates, AreHandedOutInParts) {
  const auto a = open_on_loopback(true);
  const auto b = open_on_loopback(true);
  Transfer transfer(40 * kFull, 6), next(40 * kFull, 7);
  for (const Transfer* one : {&transfer, &next}) {
    std::vector<TxPacket> packets;
    for (uint32_t i = 0; i < 40; ++i) packets.push_back(one->packet(i, b->caps().address));
    send(*a, packets);
  }
  std::array<RxPacket, 7> room;
  const std::vector<Expected> all = transfer.expected();
  for (uint32_t at = 0; at < 80;) {
    EXPECT_TRUE(at % 40 == 0 || !b->arm()) << "parts are left";
    const size_t count = b->rx(room, std::span(all).subspan(std::min<size_t>(at, 40)));
    ASSERT_GT(count, 0u);
    for (size_t i = 0; i < count; ++i, ++at)
      EXPECT_EQ(bytes_of(room[i]), bytes_of((at < 40 ? transfer : next).packet(at % 40, b->caps().address))) << at;
    b->release(std::span(room).first(count));
  }
  EXPECT_TRUE(b->arm());
}

// A call that may give an aggregate gives no more than one datagram; where there are none, one call gives many.
TEST(UdpAggregates, AreLookedForWhereTheyCome) {
  const auto grouped = open_on_loopback(true);
  const auto b = open_on_loopback(true);
  const auto alone = open_udp({.address = "127.0.0.1", .mtu = 1500, .gso = false, .gro = false});
  const std::vector<uint8_t> data(kFull);
  const auto calls_for = [&](Port& from, uint32_t count) {
    std::vector<TxPacket> packets;
    for (uint32_t i = 0; i < count; ++i) packets.push_back(contract::make(b->caps().address, i, data.data(), kFull));
    send(from, packets);
    const uint64_t before = b->counters().received_calls;
    const std::vector<RxPacket> got = receive(*b, count);
    EXPECT_EQ(got.size(), count);
    b->release(got);
    return b->counters().received_calls - before;
  };
  EXPECT_EQ(calls_for(*grouped, 40), 1u);
  uint64_t calls = 5;
  for (int attempt = 0; attempt < 3 && calls > 4; ++attempt) {  // 100 ms later aggregates are looked for again
    for (int i = 0; i < 21; ++i) calls_for(*alone, 16);
    calls_for(*alone, 32);  // by now it has been seen that packets come alone
    calls = calls_for(*alone, 32);
  }
  EXPECT_LE(calls, 4u);
  calls_for(*grouped, 40);
  const auto deadline = Clock::now() + kPatience;
  while (calls_for(*grouped, 40) > 1 && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(calls_for(*grouped, 40), 1u) << "aggregates are looked for again";
}

}  // namespace
}  // namespace harp
