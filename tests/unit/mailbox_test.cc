// Messages of any length over records that are smaller, over links that refuse and delay.
#include "engine/mailbox.h"

#include <gtest/gtest.h>

#include <random>

#include "net/loop.h"
#include "simulated.h"

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

struct Post {
  explicit Post(LoopFaults faults) : transport(2, faults) {}
  LoopTransport transport;
  Mailbox a{std::make_unique<Borrowed>(transport.link(0, 1))}, b{std::make_unique<Borrowed>(transport.link(1, 0))};
};

std::string message(size_t length, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text(length, ' ');
  for (char& c : text) c = char(random());
  return text;
}

TEST(Mailbox, ShortMessagesAreOneRecordEach) {
  Post post({.capacity = 3});
  for (size_t length : {0, 1, 60}) post.a.send(message(length, length));
  EXPECT_FALSE(post.a.waiting());
  for (size_t length : {0, 1, 60}) EXPECT_EQ(post.b.receive(), message(length, length));
  EXPECT_EQ(post.b.receive(), std::nullopt);
}

TEST(Mailbox, AMessageOneByteLongerTakesTwo) {
  Post post({.capacity = 1});
  post.a.send(message(61, 1));
  EXPECT_TRUE(post.a.waiting());
  EXPECT_EQ(post.b.receive(), std::nullopt) << "half a message";
  EXPECT_TRUE(post.a.pump());
  EXPECT_FALSE(post.a.waiting());
  EXPECT_EQ(post.b.receive(), message(61, 1));
}

TEST(Mailbox, WithoutRoomMessagesWaitInOrder) {
  Post post({.capacity = 1});
  for (size_t i = 0; i < 5; ++i) post.a.send(message(20, i));
  EXPECT_FALSE(post.a.pump()) << "there is no room";
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(post.b.receive(), message(20, i));
    EXPECT_EQ(post.a.pump(), i < 4);
  }
  EXPECT_FALSE(post.a.waiting());
}

TEST(Mailbox, EveryLengthBothWaysOverLinksThatRefuseAndDelay) {
  const uint64_t seed = test::run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (size_t record_bytes : {size_t(64), size_t(100), size_t(16 << 10)}) {
    Post post({record_bytes, 2, 0.3, 0.3, seed});
    std::vector<size_t> lengths{0, 1, 59, 60, 61, 123, 124, 125, 16443, 16444, 16445, 100'000};
    std::shuffle(lengths.begin(), lengths.end(), std::mt19937_64(seed));
    for (size_t i = 0; i < lengths.size(); ++i) {
      post.a.send(message(lengths[i], i));
      post.b.send(message(lengths[i], i + 100));
    }
    for (size_t at_a = 0, at_b = 0, turns = 0; at_a < lengths.size() || at_b < lengths.size(); ++turns) {
      ASSERT_LT(turns, 200'000u) << "stuck";
      post.a.pump(), post.b.pump();
      for (auto text = post.b.receive(); text; text = post.b.receive(), ++at_b)
        ASSERT_EQ(*text, message(lengths[at_b], at_b)) << at_b;
      for (auto text = post.a.receive(); text; text = post.a.receive(), ++at_a)
        ASSERT_EQ(*text, message(lengths[at_a], at_a + 100)) << at_a;
    }
  }
}

TEST(Mailbox, AnImpossibleLengthIsRefused) {
  Post post({});
  Link* link = post.transport.link(0, 1);
  const uint32_t length = UINT32_MAX;
  std::memcpy(link->reserve(kLine), &length, sizeof length);
  link->commit(kLine);
  EXPECT_THROW(post.b.receive(), Error);
}

}  // namespace
}  // namespace lightcc
