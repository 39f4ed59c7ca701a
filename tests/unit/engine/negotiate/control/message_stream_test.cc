// Messages of any length over records that are smaller, over links that refuse and delay.
#include "engine/negotiate/control/message_stream.h"

#include <gtest/gtest.h>

#include <random>

#include "labels.h"
#include "net/loop/loop.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

struct Borrowed : Link {  // the transport owns its links
  explicit Borrowed(Link* to) : link(to) {}
  std::byte* reserve(size_t n) override { return link->reserve(n); }
  void commit(size_t n) override { link->commit(n); }
  const std::byte* peek(size_t n) override { return link->peek(n); }
  void consume(size_t n) override { link->consume(n); }
  size_t record_bytes() const override { return link->record_bytes(); }
  Link* link;
};

struct StreamPair {
  explicit StreamPair(LoopFaults faults) : transport(2, faults) {}
  LoopNetwork transport;
  MessageStream a{std::make_unique<Borrowed>(transport.link(0, 1))},
      b{std::make_unique<Borrowed>(transport.link(1, 0))};
};

std::string message(size_t length, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text(length, ' ');
  for (char& c : text) c = char(random());
  return text;
}

TEST(MessageStream, ShortMessagesAreOneRecordEach) {
  StreamPair pair({.capacity = 3});
  for (size_t length : {0, 1, 60}) pair.a.send(message(length, length));
  EXPECT_FALSE(pair.a.waiting());
  for (size_t length : {0, 1, 60}) EXPECT_EQ(pair.b.receive(), message(length, length));
  EXPECT_EQ(pair.b.receive(), std::nullopt);
}

TEST(MessageStream, AMessageOneByteLongerTakesTwo) {
  StreamPair pair({.capacity = 1});
  pair.a.send(message(61, 1));
  EXPECT_TRUE(pair.a.waiting());
  EXPECT_EQ(pair.b.receive(), std::nullopt) << "half a message";
  EXPECT_TRUE(pair.a.pump());
  EXPECT_FALSE(pair.a.waiting());
  EXPECT_EQ(pair.b.receive(), message(61, 1));
}

TEST(MessageStream, WithoutRoomMessagesWaitInOrder) {
  StreamPair pair({.capacity = 1});
  for (size_t i = 0; i < 5; ++i) pair.a.send(message(20, i));
  EXPECT_FALSE(pair.a.pump()) << "there is no room";
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(pair.b.receive(), message(20, i));
    EXPECT_EQ(pair.a.pump(), i < 4);
  }
  EXPECT_FALSE(pair.a.waiting());
}

TEST(MessageStream, EveryLengthBothWaysOverLinksThatRefuseAndDelay) {
  const uint64_t seed = test::run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (size_t record_bytes : {size_t(64), size_t(100), size_t(16 << 10)}) {
    StreamPair pair({record_bytes, 2, 0.3, 0.3, seed});
    std::vector<size_t> lengths{0, 1, 59, 60, 61, 123, 124, 125, 16443, 16444, 16445, 100'000};
    std::shuffle(lengths.begin(), lengths.end(), std::mt19937_64(seed));
    for (size_t i = 0; i < lengths.size(); ++i) {
      pair.a.send(message(lengths[i], i));
      pair.b.send(message(lengths[i], i + 100));
    }
    for (size_t at_a = 0, at_b = 0, turns = 0; at_a < lengths.size() || at_b < lengths.size(); ++turns) {
      ASSERT_LT(turns, 200'000u) << "stuck";
      pair.a.pump(), pair.b.pump();
      for (auto text = pair.b.receive(); text; text = pair.b.receive(), ++at_b)
        ASSERT_EQ(*text, message(lengths[at_b], at_b)) << at_b;
      for (auto text = pair.a.receive(); text; text = pair.a.receive(), ++at_a)
        ASSERT_EQ(*text, message(lengths[at_a], at_a + 100)) << at_a;
    }
  }
}

TEST(MessageStream, AnImpossibleLengthIsRefused) {
  StreamPair pair({});
  Link* link = pair.transport.link(0, 1);
  const uint32_t length = UINT32_MAX;
  std::memcpy(link->reserve(kLine), &length, sizeof length);
  link->commit(kLine);
  EXPECT_THROW(pair.b.receive(), Error);
}

}  // namespace
}  // namespace lightcc
