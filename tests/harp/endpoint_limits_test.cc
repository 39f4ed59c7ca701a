// An endpoint at the bounds of what its packets and rings hold.
#include <gtest/gtest.h>

#include "harp/pair.h"
#include "labels.h"

LABEL(alone);

namespace harp::test {
namespace {

bool is(const Wire& wire, Type type) { return wire.header().type == type; }

// Small messages of which every other packet is lost leave the receiver with the most ranges to acknowledge; buffers
// that it posts then make the longest grant. Both ride on one packet.
TEST(EndpointLimits, TheLongestGrantWithTheLongestAckFitsItsPacket) {
  Pair pair({.eager_messages = 64});
  pair.settle();
  const std::vector<uint8_t> data(64);
  std::vector<uint8_t> to(100);
  int number = 0;
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(pair.a.endpoint.send(pair.a.connection, data.data(), 64, 1, pair.now));
    pair.settle([&](const Wire& wire) { return !is(wire, Type::data) || ++number % 2 == 0; });
  }
  pair.run(20 * kMillisecond);
  ASSERT_TRUE(pair.a.endpoint.send(pair.a.connection, data.data(), 64, 1, pair.now));
  uint64_t expected = 0;
  for (const Wire& wire : pair.a.give(pair.now)) {
    expected = wire.header().number + 1;
    pair.b.take(wire, pair.now);
  }
  for (int i = 0; i < 41; ++i) ASSERT_TRUE(pair.b.endpoint.receive(pair.b.connection, to.data(), 100, 2, pair.now));
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(pair.b.endpoint.receive(pair.b.connection, to.data(), 100, 2, pair.now));
  size_t granted = 0, ranges = 0;
  for (const Wire& wire : pair.b.give(pair.now)) {
    EXPECT_LE(wire.head.size(), kMostControlBytes);
    if (!is(wire, Type::grant)) continue;
    const std::span<const uint8_t> body = std::span(wire.head).subspan(kHeaderBytes);
    size_t used = 0;
    const auto grant = read_grant(body, &used);
    ASSERT_TRUE(grant);
    granted += grant->count;
    if (!(wire.header().flags & kWithAck)) continue;
    const auto ack = read_ack(body.subspan(used), expected);
    ASSERT_TRUE(ack);
    EXPECT_EQ(grant->count, kMostGrants);
    ranges = std::max<size_t>(ranges, ack->count);
  }
  EXPECT_EQ(granted, 100u);
  EXPECT_EQ(ranges, kMostRanges);
}

// Acknowledgements take packet numbers too. A lost packet must not be forgotten because many of them followed it.
TEST(EndpointLimits, ALostPacketIsRememberedBehindAnyNumberOfAcknowledgements) {
  Pair pair({.receive_packets = 16, .ack_every = 1});
  pair.settle();
  std::vector<uint8_t> lost = {1, 2, 3}, got(3), data(20'000'000), to(20'000'000);
  pair.b.endpoint.receive(pair.b.connection, got.data(), 3, 1, pair.now);
  pair.settle();
  pair.a.endpoint.send(pair.a.connection, lost.data(), 3, 2, pair.now);
  for (const Wire& wire : pair.a.give(pair.now)) EXPECT_TRUE(is(wire, Type::data)) << "lost";
  pair.a.endpoint.receive(pair.a.connection, to.data(), uint32_t(to.size()), 3, pair.now);
  pair.b.endpoint.send(pair.b.connection, data.data(), uint32_t(data.size()), 4, pair.now);
  pair.settle([](const Wire& wire) { return wire.header().total != 3; });  // no time passes: nothing is missed yet
  pair.run(kSecond);
  ASSERT_EQ(pair.a.completions.size(), 2u);
  ASSERT_EQ(pair.b.completions.size(), 2u);
  EXPECT_EQ(got, lost);
}

// The owner may call the endpoint while it carries events out: records may be given back at once.
TEST(EndpointLimits, RecordsMayBeConsumedWhileTheyAreDelivered) {
  Pair pair({.stream_frames = 4}, Mode::stream);
  struct Consumer : Host {
    using Host::Host;
    void record(ConnectionId id, const Record& record) override {
      Host::record(id, record);
      endpoint.consume(id, 1, kSecond);
    }
  } consumer(3, {.stream_frames = 4});
  const Nonce nonce = consumer.endpoint.listen();
  const ConnectionId id = pair.a.endpoint.connect(address_of(3, 0), nonce, Mode::stream, pair.now);
  const std::string text = "record";
  for (int i = 0; i < 20; ++i)
    pair.a.endpoint.send(id, reinterpret_cast<const uint8_t*>(text.data()), uint32_t(text.size()), 5, pair.now);
  for (int rounds = 0; rounds < 300; ++rounds) {
    for (const Wire& wire : pair.a.give(pair.now))
      if (wire.to == address_of(3, 0)) consumer.take(wire, pair.now);
    for (const Wire& wire : consumer.give(pair.now)) pair.a.take(wire, pair.now);
    pair.later(100 * kMicrosecond);
    consumer.endpoint.advance(pair.now);
  }
  EXPECT_EQ(consumer.records, std::vector<std::string>(20, text));
  EXPECT_TRUE(consumer.kept.empty());
}

}  // namespace
}  // namespace harp::test
