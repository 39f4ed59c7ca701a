#include "harp_plugin/port/spsc_ring.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace harp {
namespace {

TEST(SpscRing, CapacityIsRoundedUpToAPowerOfTwo) {
  EXPECT_EQ(SpscRing<int>(1).capacity(), 1u);
  EXPECT_EQ(SpscRing<int>(5).capacity(), 8u);
  EXPECT_EQ(SpscRing<int>(64).capacity(), 64u);
}

TEST(SpscRing, TakesItsCapacityAndNoMore) {
  SpscRing<int> ring(4);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(ring.producer().push(i));
  EXPECT_FALSE(ring.producer().push(4));
  int got = -1;
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(ring.consumer().pop(got));
    EXPECT_EQ(got, i);
  }
  EXPECT_FALSE(ring.consumer().pop(got));
}

TEST(SpscRing, BatchesWrapAround) {
  SpscRing<int> ring(8);
  int next = 0;
  int expected = 0;
  std::vector<int> in(5);
  std::vector<int> out(7);
  for (int round = 0; round < 100; ++round) {
    std::iota(in.begin(), in.end(), next);
    next += static_cast<int>(ring.producer().push(in));
    const size_t count = ring.consumer().pop(out);
    for (size_t i = 0; i < count; ++i) EXPECT_EQ(out[i], expected++);
  }
  EXPECT_EQ(next, expected);
  EXPECT_EQ(next, 500);
}

TEST(SpscRing, ABatchThatDoesNotFitIsTakenInPart) {
  SpscRing<int> ring(4);
  const std::vector<int> in{1, 2, 3, 4, 5, 6};
  EXPECT_EQ(ring.producer().push(in), 4u);
  EXPECT_EQ(ring.producer().taken(), 0u);
  ring.consumer().available(4);
  ring.consumer().retire(3);
  EXPECT_EQ(ring.producer().taken(), 3u);
  EXPECT_EQ(ring.producer().push(std::span(in).subspan(4)), 2u);
}

TEST(SpscRing, TwoThreadsMoveEverythingInOrder) {
  SpscRing<uint64_t> ring(64);
  constexpr uint64_t kItems = 200'000;
  std::thread producer([&] {
    std::minstd_rand random(1);
    std::vector<uint64_t> batch;
    for (uint64_t next = 0; next < kItems;) {
      batch.resize(std::min<uint64_t>(1 + random() % 40, kItems - next));
      std::iota(batch.begin(), batch.end(), next);
      const size_t count = ring.producer().push(batch);
      next += count;
      if (!count) std::this_thread::yield();
    }
  });
  std::minstd_rand random(2);
  std::vector<uint64_t> batch;
  uint64_t wrong = 0;
  for (uint64_t next = 0; next < kItems;) {
    batch.resize(1 + random() % 40);
    const size_t count = ring.consumer().pop(batch);
    for (size_t i = 0; i < count; ++i) wrong += batch[i] != next++;
    if (!count) std::this_thread::yield();
  }
  producer.join();
  EXPECT_EQ(wrong, 0u);
}

TEST(SpscRing, SlotsAreWrittenInPlaceAndSeenOnlyOncePublished) {
  SpscRing<int> ring(4);
  ASSERT_EQ(ring.producer().room(4), 4u);
  ring.producer().slot(0) = 10;
  ring.producer().slot(1) = 11;
  EXPECT_EQ(ring.consumer().available(), 0u);
  ring.producer().publish(2);
  ASSERT_EQ(ring.consumer().available(), 2u);
  EXPECT_EQ(ring.consumer().slot(1), 11);
  EXPECT_EQ(ring.consumer().read(0), 10);
}

// The indices and slots as another process could leave them.
struct Shared {
  RingIndices indices;
  std::array<uint32_t, 8> slots{};
};

TEST(SpscRingHostile, ATailTooFarAheadBreaksTheConsumer) {
  Shared shared;
  RingConsumer<uint32_t> consumer(&shared.indices, shared.slots.data(), 8);
  shared.indices.tail = 9;
  EXPECT_EQ(consumer.available(8), 0u);
  EXPECT_TRUE(consumer.broken());
  shared.indices.tail = 1;  // it does not heal
  EXPECT_EQ(consumer.available(), 0u);
}

TEST(SpscRingHostile, ATailThatGoesBackBreaksTheConsumer) {
  Shared shared;
  RingConsumer<uint32_t> consumer(&shared.indices, shared.slots.data(), 8);
  shared.indices.tail = 5;
  EXPECT_EQ(consumer.available(), 5u);
  consumer.retire(2);
  shared.indices.tail = 4;
  EXPECT_EQ(consumer.available(8), 0u);
  EXPECT_TRUE(consumer.broken());
}

TEST(SpscRingHostile, AHeadBeyondTheTailBreaksTheProducer) {
  Shared shared;
  RingProducer<uint32_t> producer(&shared.indices, shared.slots.data(), 8);
  for (uint32_t i = 0; i < 8; ++i) EXPECT_TRUE(producer.push(i));
  shared.indices.head = 9;
  EXPECT_FALSE(producer.push(1));
  EXPECT_TRUE(producer.broken());
}

TEST(SpscRingHostile, AHeadThatGoesBackBreaksTheProducer) {
  Shared shared;
  RingProducer<uint32_t> producer(&shared.indices, shared.slots.data(), 8);
  for (uint32_t i = 0; i < 8; ++i) EXPECT_TRUE(producer.push(i));
  shared.indices.head = 4;
  EXPECT_EQ(producer.taken(), 4u);
  shared.indices.head = 3;
  EXPECT_EQ(producer.taken(), 4u);
  EXPECT_TRUE(producer.broken());
}

TEST(SpscRingHostile, RandomIndicesNeverLeadOutOfTheSlots) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto shared = std::make_unique<Shared>();  // on the heap: AddressSanitizer guards its ends
    RingProducer<uint32_t> producer(&shared->indices, shared->slots.data(), 8);
    RingConsumer<uint32_t> consumer(&shared->indices, shared->slots.data(), 8);
    std::array<uint32_t, 16> items{};
    for (int step = 0; step < 50; ++step) {
      const uint64_t index = random() % 2 ? random() : random() % 32;
      if (random() % 4 == 0) shared->indices.tail = index;
      if (random() % 4 == 0) shared->indices.head = index;
      EXPECT_LE(producer.push(items), 8u);
      EXPECT_LE(consumer.pop(items), 8u);
    }
  }
}

}  // namespace
}  // namespace harp
