// The protocol, packet by packet: what one endpoint does with what the other sent, or with less or more than that.
#include "harp_plugin/core/endpoint.h"

#include <gtest/gtest.h>

#include <numeric>

#include "harp/pair.h"
#include "labels.h"

LABEL(alone);
LABEL(idle, "EndpointTest.Idle*");

namespace harp::test {
namespace {

std::vector<uint8_t> pattern(size_t bytes, uint32_t seed = 1) {
  std::vector<uint8_t> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = uint8_t((i * 2654435761u + seed * 40503u) >> 11);
  return data;
}

bool is_data(const Wire& wire) { return wire.header().type == Type::data; }

struct EndpointTest : testing::Test {
  void open(Pair& pair) {
    pair.settle();
    ASSERT_NE(pair.b.connection, 0u);
  }
  // One message of this size from a to b, in a buffer with guards behind it.
  void exchange(Pair& pair, size_t bytes, size_t capacity) {
    const std::vector<uint8_t> data = pattern(bytes);
    std::vector<uint8_t> to(capacity + 64, 0xee);
    pair.a.completions.clear();
    pair.b.completions.clear();
    ASSERT_TRUE(pair.b.endpoint.receive(pair.b.connection, to.data(), uint32_t(capacity), 7, pair.now));
    ASSERT_TRUE(pair.a.endpoint.send(pair.a.connection, data.data(), uint32_t(bytes), 3, pair.now));
    pair.run(10 * kMillisecond);
    ASSERT_EQ(pair.b.completions.size(), 1u) << bytes;
    ASSERT_EQ(pair.a.completions.size(), 1u) << bytes;
    EXPECT_EQ(pair.b.completions[0].status, Status::ok);
    EXPECT_EQ(pair.b.completions[0].bytes, bytes);
    EXPECT_EQ(pair.b.completions[0].request, 7u);
    EXPECT_EQ(pair.a.completions[0].status, Status::ok);
    EXPECT_TRUE(std::equal(data.begin(), data.end(), to.begin())) << bytes;
    EXPECT_TRUE(std::all_of(to.begin() + ptrdiff_t(capacity), to.end(), [](uint8_t b) { return b == 0xee; }));
  }
};

TEST_F(EndpointTest, OpensInThreeSteps) {
  Pair pair;
  const auto open = pair.a.give(pair.now);
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].header().type, Type::open);
  pair.b.take(open[0], pair.now);
  EXPECT_EQ(pair.b.connection, 0u) << "half open: the opener may not exist";
  const auto answer = pair.b.give(pair.now);
  ASSERT_EQ(answer.size(), 1u);
  EXPECT_EQ(answer[0].header().type, Type::open_ack);
  pair.a.take(answer[0], pair.now);
  const auto probe = pair.a.give(pair.now);
  ASSERT_EQ(probe.size(), 1u);
  EXPECT_EQ(probe[0].header().type, Type::probe);
  pair.b.take(probe[0], pair.now);
  EXPECT_NE(pair.b.connection, 0u);
}

// The application hears of a connection before anything that came by it, whichever packet is lost.
TEST_F(EndpointTest, ARecordThatComesBeforeTheThirdStepIsNotLost) {
  struct Order : test::Host {
    using Host::Host;
    void record(ConnectionId id, const Record& record) override {
      EXPECT_EQ(connection, id) << "a record of a connection that has not been opened";
      Host::record(id, record);
    }
  };
  Order b(2, {});
  const Nonce nonce = b.endpoint.listen();
  test::Host a(1, {});
  uint64_t now = 1'000'000'000;
  a.connection = a.endpoint.connect(test::address_of(2, 0), nonce, Mode::stream, now);
  for (const auto& open : a.give(now)) b.take(open, now);
  for (const auto& answer : b.give(now)) a.take(answer, now);
  const std::string word = "first";
  ASSERT_TRUE(a.endpoint.send(a.connection, reinterpret_cast<const uint8_t*>(word.data()), 5, 1, now));
  size_t probes = 0;
  for (const auto& packet : a.give(now)) {
    const bool is_probe = packet.header().type == Type::probe;
    probes += is_probe;
    if (!is_probe) b.take(packet, now);
  }
  EXPECT_EQ(probes, 1u) << "it was lost";
  EXPECT_EQ(b.records, std::vector<std::string>{word});
}

TEST_F(EndpointTest, SizesAroundEveryBorder) {
  for (const bool authenticate : {false, true}) {
    Options options{.authenticate = authenticate, .secret = "s"};
    Pair pair(options);
    open(pair);
    for (const size_t bytes : {0, 1, 15, 16, 17, 1439, 1440, 1441, 8191, 8192, 8193, 14399, 14400, 200'000, 1 << 20}) {
      exchange(pair, bytes, bytes);
      exchange(pair, bytes, bytes + 100);
    }
  }
}

TEST_F(EndpointTest, SmallMessagesComeBeforeTheirBuffer) {
  Pair pair;
  open(pair);
  const auto data = pattern(5000);
  for (uint64_t i = 0; i < 20; ++i) pair.a.endpoint.send(pair.a.connection, data.data(), 5000, i, pair.now);
  pair.run(kMillisecond);
  EXPECT_EQ(pair.a.completions.size(), 16u) << "as many as the pool takes";
  std::vector<std::vector<uint8_t>> to(20, std::vector<uint8_t>(5000));
  for (uint64_t i = 0; i < 20; ++i) pair.b.endpoint.receive(pair.b.connection, to[i].data(), 5000, i, pair.now);
  EXPECT_EQ(pair.b.completions.size(), 16u) << "these were there";
  pair.run(kMillisecond);
  EXPECT_EQ(pair.a.completions.size(), 20u);
  EXPECT_EQ(pair.b.completions.size(), 20u);
  for (const auto& bytes : to) EXPECT_EQ(bytes, data);
}

TEST_F(EndpointTest, LargeMessagesWaitForTheirGrant) {
  Pair pair;
  open(pair);
  const auto data = pattern(50'000);
  pair.a.endpoint.send(pair.a.connection, data.data(), 50'000, 1, pair.now);
  pair.settle([](const Wire& wire) {
    EXPECT_FALSE(is_data(wire));
    return true;
  });
  EXPECT_TRUE(pair.a.completions.empty());
}

TEST_F(EndpointTest, TooLongIsToldToBothAndTheConnectionGoesOn) {
  Pair pair;
  open(pair);
  const auto data = pattern(50'000);
  std::vector<uint8_t> to(49'999, 0xee);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 49'999, 1, pair.now);
  pair.a.endpoint.send(pair.a.connection, data.data(), 50'000, 2, pair.now);
  pair.run(kMillisecond);
  ASSERT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(pair.b.completions[0].status, Status::too_long);
  EXPECT_EQ(pair.b.completions[0].bytes, 50'000u);
  ASSERT_EQ(pair.a.completions.size(), 1u);
  EXPECT_EQ(pair.a.completions[0].status, Status::too_long);
  EXPECT_TRUE(std::all_of(to.begin(), to.end(), [](uint8_t b) { return b == 0xee; }));
  exchange(pair, 50'000, 50'000);
}

TEST_F(EndpointTest, EverySinglePacketMayBeLost) {
  for (int victim = 0; victim < 40; ++victim) {
    Pair pair({.first_number = (uint64_t(1) << 32) - 10});
    int seen = 0;
    const auto passes = [&](const Wire&) { return seen++ != victim; };
    std::vector<uint8_t> to(30'000);
    const auto data = pattern(30'000);
    pair.run(200 * kMillisecond, passes);
    ASSERT_NE(pair.b.connection, 0u) << victim;
    pair.b.endpoint.receive(pair.b.connection, to.data(), 30'000, 1, pair.now);
    pair.a.endpoint.send(pair.a.connection, data.data(), 30'000, 2, pair.now);
    pair.run(200 * kMillisecond, passes);
    EXPECT_EQ(pair.a.completions.size(), 1u) << victim;
    EXPECT_EQ(pair.b.completions.size(), 1u) << victim;
    EXPECT_EQ(to, data) << victim;
  }
}

TEST_F(EndpointTest, ALostSegmentAloneIsSentAgain) {
  Pair pair;
  open(pair);
  const auto data = pattern(14'400);
  std::vector<uint8_t> to(14'400);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 14'400, 1, pair.now);
  pair.settle();
  pair.a.endpoint.send(pair.a.connection, data.data(), 14'400, 2, pair.now);
  int sent = 0;
  pair.run(5 * kMillisecond, [&](const Wire& wire) { return !is_data(wire) || sent++ != 3; });
  EXPECT_EQ(sent, 11) << "ten segments and the fourth once more: no go-back-N";
  EXPECT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(to, data);
}

// A message goes twice because its acknowledgement is late; the second one never arrives.
TEST_F(EndpointTest, APacketThatIsLostAfterItsDataHaveComeEndsNothing) {
  Pair pair;
  open(pair);
  exchange(pair, 100, 100);
  const auto data = pattern(100);
  std::vector<uint8_t> to(100);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 100, 1, pair.now);
  pair.a.endpoint.send(pair.a.connection, data.data(), 100, 2, pair.now);
  for (const Wire& wire : pair.a.give(pair.now)) pair.b.take(wire, pair.now);
  bool again = false;
  for (int ms = 0; ms < 100 && !again; ++ms) {
    pair.now += kMillisecond;
    pair.a.endpoint.advance(pair.now);
    for (const Wire& wire : pair.a.give(pair.now)) again |= is_data(wire);
  }
  ASSERT_TRUE(again);
  pair.run(60 * kSecond);
  EXPECT_EQ(pair.a.completions.size(), 2u);
  EXPECT_TRUE(pair.a.failures.empty() && pair.b.failures.empty());
  exchange(pair, 100, 100);
}

TEST_F(EndpointTest, DuplicatesAndOvertakingDoNoHarm) {
  Pair pair;
  open(pair);
  const auto data = pattern(20'000);
  std::vector<uint8_t> to(20'000);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 20'000, 1, pair.now);
  pair.settle();
  pair.a.endpoint.send(pair.a.connection, data.data(), 20'000, 2, pair.now);
  for (int rounds = 0; rounds < 20; ++rounds) {
    auto wires = pair.a.give(pair.now);
    std::reverse(wires.begin(), wires.end());
    for (const Wire& wire : wires) {
      pair.b.take(wire, pair.now);
      pair.b.take(wire, pair.now);
    }
    for (const Wire& wire : pair.b.give(pair.now)) pair.a.take(wire, pair.now);
    pair.later(100 * kMicrosecond);
  }
  EXPECT_EQ(pair.a.completions.size(), 1u);
  EXPECT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(to, data);
  EXPECT_GE(pair.b.endpoint.counters(pair.b.connection)->duplicates, 14u);
}

// A port may scatter packets over all of the places, and put those that belong elsewhere together from there.
TEST_F(EndpointTest, PlacesThatAreExpectedInDoNotOverlap) {
  const auto places = [&](size_t first, size_t second) {
    constexpr uint32_t kFull = 1440, kBytes = kFull + 100;
    Pair pair({.payload = kFull});
    open(pair);
    std::vector<uint8_t> memory(2 * kBytes);
    const auto data = pattern(kBytes);
    for (const size_t offset : {first, second}) {
      EXPECT_TRUE(pair.b.endpoint.receive(pair.b.connection, &memory[offset], kBytes, 1, pair.now));
      EXPECT_TRUE(pair.a.endpoint.send(pair.a.connection, data.data(), kBytes, 2, pair.now));
    }
    for (const Wire& wire : pair.a.give(pair.now))
      if (is_data(wire) && wire.header().message == 0 && wire.header().offset == 0) pair.b.take(wire, pair.now);
    return pair.b.endpoint.expected().size();
  };
  EXPECT_EQ(places(0, 1540), 3u) << "the rest of the first, and the second";
  EXPECT_EQ(places(1540, 0), 3u);
  EXPECT_EQ(places(0, 1539), 1u);
  EXPECT_EQ(places(1539, 0), 1u);
  EXPECT_EQ(places(5, 5), 1u);
}

// How long a message is, its own packets say, or those of the one before it that is as long.
TEST_F(EndpointTest, OnlyWhatBelongsToAMessageIsExpected) {
  constexpr uint32_t kFull = 1440, kRoom = 10 * kFull;
  Pair pair({.payload = kFull});
  open(pair);
  std::vector<std::vector<uint8_t>> buffers(4, std::vector<uint8_t>(kRoom, 0xee));
  const auto data = pattern(kRoom);
  const auto expects = [&] {  // messages' numbers and the bytes that are expected of each
    std::map<uint16_t, uint32_t> bytes;
    for (const Expected& one : pair.b.endpoint.expected()) bytes[one.message] += one.bytes;
    return bytes;
  };
  using Bytes = std::map<uint16_t, uint32_t>;
  for (auto& buffer : buffers) pair.b.endpoint.receive(pair.b.connection, buffer.data(), kRoom, 1, pair.now);
  pair.settle();
  EXPECT_EQ(expects(), Bytes{});
  for (const uint32_t bytes : {3 * kFull, 3 * kFull, kFull + 1, kFull + 1})
    pair.a.endpoint.send(pair.a.connection, data.data(), bytes, 2, pair.now);
  std::vector<Wire> wires = pair.a.give(pair.now);
  std::erase_if(wires, [](const Wire& wire) { return !is_data(wire); });
  ASSERT_EQ(wires.size(), 10u);
  const auto take = [&](size_t i) { pair.b.take(wires[i], pair.now); };
  take(0);
  EXPECT_EQ(expects(), (Bytes{{0, 2 * kFull}, {1, 3 * kFull}})) << "the second is as long as the first";
  take(1);
  take(2);
  EXPECT_EQ(expects(), (Bytes{{1, 3 * kFull}}));
  take(4);
  EXPECT_EQ(expects(), (Bytes{{1, kFull}})) << "what follows is of another length";
  take(3);
  take(5);
  EXPECT_EQ(expects(), Bytes{}) << "nothing is known of the third";
  take(6);
  EXPECT_EQ(expects(), (Bytes{{2, 1}, {3, kFull + 1}}));
  for (size_t i = 7; i < 10; ++i) take(i);
  EXPECT_EQ(expects(), Bytes{});
  EXPECT_EQ(pair.b.completions.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const uint32_t bytes = i < 2 ? 3 * kFull : kFull + 1;
    EXPECT_TRUE(std::equal(buffers[i].begin(), buffers[i].begin() + bytes, data.begin())) << i;
    EXPECT_EQ(std::count(buffers[i].begin() + bytes, buffers[i].end(), 0xee), long(kRoom - bytes)) << i;
  }
}

TEST_F(EndpointTest, ASilentPeerFailsWithItsTimeAndName) {
  Pair pair({.peer_timeout_ns = kSecond});
  open(pair);
  std::vector<uint8_t> to(10);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 10, 1, pair.now);
  pair.settle();
  pair.run(1300 * kMillisecond, [](const Wire&) { return false; });
  ASSERT_EQ(pair.b.failures.size(), 1u);
  EXPECT_EQ(pair.b.failures[0].first, Status::peer_silent);
  EXPECT_NE(pair.b.failures[0].second.find("1.0 s"), std::string::npos);
  ASSERT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(pair.b.completions[0].status, Status::peer_silent);
}

TEST_F(EndpointTest, ASilenceShorterThanTheTimeOutIsSurvived) {
  Pair pair({.peer_timeout_ns = 4 * kSecond});
  open(pair);
  const auto data = pattern(300'000);
  std::vector<uint8_t> to(300'000);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 300'000, 1, pair.now);
  pair.settle();
  pair.a.endpoint.send(pair.a.connection, data.data(), 300'000, 2, pair.now);
  pair.run(3 * kSecond, [](const Wire&) { return false; });
  EXPECT_TRUE(pair.a.failures.empty());
  pair.run(kSecond);
  EXPECT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(to, data);
}

TEST_F(EndpointTest, TimeThatThisProcessSleptIsNotThePeers) {
  Pair pair({.peer_timeout_ns = kSecond});
  open(pair);
  pair.later(kMillisecond);
  const auto data = pattern(100);
  pair.a.endpoint.send(pair.a.connection, data.data(), 100, 1, pair.now);
  pair.a.give(pair.now);  // in flight
  pair.now += 20 * kSecond;
  pair.a.endpoint.advance(pair.now);
  pair.b.endpoint.advance(pair.now);
  pair.run(kSecond);
  EXPECT_TRUE(pair.a.failures.empty());
  EXPECT_TRUE(pair.b.failures.empty());
}

// Packets that waited while this process was stopped are read before its timers are looked at.
TEST_F(EndpointTest, APeerThatFallsSilentAfterThisProcessSleptHasNoMoreTimeThanAnyOther) {
  Pair pair({.peer_timeout_ns = kSecond});
  open(pair);
  pair.later(kMillisecond);
  const auto data = pattern(100);
  pair.a.endpoint.send(pair.a.connection, data.data(), 100, 2, pair.now);
  const std::vector<Wire> waiting = pair.a.give(pair.now);
  pair.now += 20 * kSecond;
  for (const Wire& wire : waiting) pair.b.take(wire, pair.now);
  pair.b.endpoint.advance(pair.now);
  pair.run(1300 * kMillisecond, [](const Wire&) { return false; });
  ASSERT_EQ(pair.b.failures.size(), 1u);
  EXPECT_EQ(pair.b.failures[0].first, Status::peer_silent);
}

TEST_F(EndpointTest, CloseIsHeardAndEndsRequests) {
  Pair pair;
  open(pair);
  std::vector<uint8_t> to(10);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 10, 1, pair.now);
  pair.settle();
  pair.a.endpoint.close(pair.a.connection, pair.now);
  pair.run(50 * kMillisecond);
  ASSERT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(pair.b.completions[0].status, Status::peer_closed);
  ASSERT_EQ(pair.b.failures.size(), 1u);
  EXPECT_EQ(pair.b.failures[0].first, Status::peer_closed);
  pair.b.endpoint.close(pair.b.connection, pair.now);
  pair.run(50 * kMillisecond);
  EXPECT_EQ(pair.a.endpoint.counters(pair.a.connection), nullptr);
  EXPECT_EQ(pair.b.endpoint.counters(pair.b.connection), nullptr);
  EXPECT_EQ(pair.a.endpoint.next_ns(), UINT64_MAX);
}

TEST_F(EndpointTest, WhatWasReceivedBeforeTheCloseIsDelivered) {
  Pair pair;
  open(pair);
  const auto data = pattern(100);
  pair.a.endpoint.send(pair.a.connection, data.data(), 100, 1, pair.now);
  pair.run(kMillisecond);
  pair.a.endpoint.close(pair.a.connection, pair.now);
  pair.run(10 * kMillisecond);
  std::vector<uint8_t> to(100), none(100);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 100, 1, pair.now);
  pair.b.endpoint.receive(pair.b.connection, none.data(), 100, 2, pair.now);
  ASSERT_EQ(pair.b.completions.size(), 2u);
  EXPECT_EQ(pair.b.completions[0].status, Status::ok);
  EXPECT_EQ(to, data);
  EXPECT_EQ(pair.b.completions[1].status, Status::peer_closed);
}

TEST_F(EndpointTest, APeerThatWasStartedAnewResets) {
  Pair pair;
  open(pair);
  Host other(2, {});
  std::vector<uint8_t> to(10);
  pair.a.endpoint.receive(pair.a.connection, to.data(), 10, 1, pair.now);
  pair.later(kMillisecond);
  for (const Wire& wire : pair.a.give(pair.now)) other.take(wire, pair.now);
  for (const Wire& wire : other.give(pair.now)) pair.a.take(wire, pair.now);
  ASSERT_EQ(pair.a.failures.size(), 1u);
  EXPECT_EQ(pair.a.failures[0].first, Status::peer_failed);
}

// Who knows nothing may ask for as many answers as there are addresses: few are given, behind the data.
TEST_F(EndpointTest, ResetsAreFewAndComeLast) {
  Pair pair;
  open(pair);
  const auto is_reset = [](const Wire& wire) { return wire.header().type == Type::reset; };
  uint16_t cookie = 0;
  const auto strays = [&](Host& host, uint8_t flags) {
    for (uint32_t i = 0; i < 1000; ++i) {
      Wire stray{std::vector<uint8_t>(kHeaderBytes), {}, address_of(uint8_t(3 + i % 200), 0), address_of(2, 0), 0};
      write_header({.type = Type::probe, .flags = flags, .conn = 0xabc00000 + i, .path = cookie}, stray.head.data());
      host.take(stray, pair.now);
    }
  };
  const auto data = pattern(20'000);
  std::vector<uint8_t> to(20'000);
  pair.a.endpoint.receive(pair.a.connection, to.data(), 20'000, 1, pair.now);
  pair.settle();
  pair.b.endpoint.send(pair.b.connection, data.data(), 20'000, 2, pair.now);
  strays(pair.b, 0);
  std::vector<Wire> sent = pair.b.give(pair.now);
  const auto resets = std::count_if(sent.begin(), sent.end(), is_reset);
  EXPECT_GT(resets, 0);
  EXPECT_LE(resets, 32);
  EXPECT_TRUE(std::all_of(sent.end() - resets, sent.end(), is_reset)) << "before data";
  EXPECT_GT(std::count_if(sent.begin(), sent.end(), is_data), 5);
  pair.later(kSecond);
  strays(pair.b, 0);
  sent = pair.b.give(pair.now);
  EXPECT_EQ(std::count_if(sent.begin(), sent.end(), is_reset), 10) << "in a second";
  Host tagged(2, {.authenticate = true, .secret = "s"});
  strays(tagged, kTagged);
  EXPECT_EQ(tagged.endpoint.strays().unauthenticated, 1000u) << "without the cookie";
  cookie = cookie_of("s");
  strays(tagged, kTagged);
  EXPECT_EQ(tagged.endpoint.strays().out_of_window, 1000u);
  EXPECT_TRUE(tagged.give(pair.now).empty()) << "nobody would believe it";
}

TEST_F(EndpointTest, WithTagsNoForgedOrReplayedPacketIsTaken) {
  Pair pair({.authenticate = true, .secret = "right"});
  open(pair);
  const auto data = pattern(1000);
  std::vector<uint8_t> to(1000, 0xee);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 1000, 1, pair.now);
  pair.a.endpoint.send(pair.a.connection, data.data(), 1000, 2, pair.now);
  std::vector<Wire> sent;
  for (const Wire& wire : pair.a.give(pair.now))
    if (is_data(wire)) sent.push_back(wire);
  ASSERT_EQ(sent.size(), 1u);
  for (size_t byte = 0; byte < sent[0].head.size() + sent[0].payload.size(); ++byte) {
    Wire forged = sent[0];
    (byte < forged.head.size() ? forged.head[byte] : forged.payload[byte - forged.head.size()]) ^= 0x10;
    pair.b.take(forged, pair.now);
  }
  EXPECT_TRUE(pair.b.completions.empty());
  EXPECT_GE(pair.b.endpoint.counters(pair.b.connection)->unauthenticated, 1000u);
  pair.b.take(sent[0], pair.now);
  ASSERT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(to, data);
  pair.b.take(sent[0], pair.now);
  EXPECT_EQ(pair.b.endpoint.counters(pair.b.connection)->duplicates, 1u);
}

TEST_F(EndpointTest, AnotherSecretOpensNothing) {
  Pair pair({.authenticate = true, .secret = "right"}, {.authenticate = true, .secret = "wrong"}, Mode::message);
  pair.run(kSecond);
  EXPECT_EQ(pair.b.connection, 0u);
  EXPECT_GE(pair.b.endpoint.strays().unauthenticated, 1u);
}

TEST_F(EndpointTest, NobodyThereIsAConnectTimeOut) {
  Pair pair({.connect_timeout_ns = 3 * kSecond});
  pair.run(4 * kSecond, [](const Wire&) { return false; });
  ASSERT_EQ(pair.a.failures.size(), 1u);
  EXPECT_EQ(pair.a.failures[0].first, Status::connect_timeout);
}

TEST_F(EndpointTest, RecordsComeInOrderAndCreditComesBack) {
  Pair pair({.stream_frames = 8}, Mode::stream);
  open(pair);
  std::vector<std::vector<uint8_t>> data;
  for (uint32_t i = 0; i < 30; ++i) data.push_back(pattern(100 + i * 40, i));
  for (uint64_t i = 0; i < 30; ++i)
    ASSERT_TRUE(pair.a.endpoint.send(pair.a.connection, data[i].data(), uint32_t(data[i].size()), i, pair.now));
  int number = 0;
  const auto lossy = [&](const Wire&) { return ++number % 7 != 0; };
  pair.run(20 * kMillisecond, lossy);
  EXPECT_EQ(pair.b.records.size(), 8u) << "all its credit";
  EXPECT_EQ(pair.b.kept.size(), 8u);
  while (pair.b.records.size() < 30) {
    const size_t before = pair.b.records.size();
    pair.b.endpoint.consume(pair.b.connection, 5, pair.now);
    pair.run(50 * kMillisecond, lossy);
    ASSERT_GT(pair.b.records.size(), before);
  }
  for (size_t i = 0; i < 30; ++i)
    EXPECT_EQ(pair.b.records[i], std::string(data[i].begin(), data[i].end())) << i;
  EXPECT_EQ(pair.a.completions.size(), 30u);
  pair.b.endpoint.close(pair.b.connection, pair.now);
  EXPECT_TRUE(pair.b.kept.empty()) << "what is lent is given back at the close";
}

TEST_F(EndpointTest, IdleConnectionsOnlyGiveSignsOfLife) {
  Pair pair;
  open(pair);
  pair.run(kSecond);
  int packets = 0;
  pair.run(10 * kSecond, [&](const Wire&) {
    ++packets;
    return true;
  });
  EXPECT_TRUE(pair.a.failures.empty() && pair.b.failures.empty());
  EXPECT_LE(packets, 100);
  EXPECT_GE(packets, 10);
}

TEST_F(EndpointTest, ADeadPathRestsAndTheOthersCarry) {
  Pair pair({.paths = 4});
  open(pair);
  const auto data = pattern(400'000);
  std::vector<uint8_t> to(400'000);
  pair.b.endpoint.receive(pair.b.connection, to.data(), 400'000, 1, pair.now);
  pair.settle();
  pair.a.endpoint.send(pair.a.connection, data.data(), 400'000, 2, pair.now);
  pair.run(2 * kSecond, [](const Wire& wire) { return wire.header().path != 2; });
  EXPECT_EQ(pair.b.completions.size(), 1u);
  EXPECT_EQ(to, data);
  EXPECT_TRUE(pair.a.failures.empty());
}

}  // namespace
}  // namespace harp::test
