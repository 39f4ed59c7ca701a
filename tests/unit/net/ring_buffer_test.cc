// The ring of records: order, wrap, room, several readers, one thread or many.
#include "net/ring_buffer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "unit/simulated.h"

namespace lightcc {
namespace {

constexpr size_t kCapacity = 1024;

struct Ring {
  explicit Ring(int readers) : tails(size_t(readers)) {}
  RingWriter writer() {
    std::vector<const Cursor*> all;
    for (const Cursor& tail : tails) all.push_back(&tail);
    return {&head, data, kCapacity, all};
  }
  RingReader reader(int i) { return {&head, data, kCapacity, &tails[size_t(i)]}; }
  Cursor head;
  std::vector<Cursor> tails;
  alignas(kLine) std::byte data[kCapacity];
};

std::byte value(size_t record, size_t i) { return std::byte((record * 31 + i * 7 + 1) & 0xff); }
bool put(RingWriter& writer, size_t record, size_t n) {
  std::byte* to = writer.reserve(n);
  if (!to) return false;
  for (size_t i = 0; i < n; ++i) to[i] = value(record, i);
  writer.commit(n);
  return true;
}
// False: nothing there. A wrong byte fails the test.
bool get(RingReader& reader, size_t record, size_t n) {
  const std::byte* from = reader.peek(n);
  if (!from) return false;
  for (size_t i = 0; i < n; ++i)
    if (from[i] != value(record, i)) return ADD_FAILURE() << "record " << record << ", byte " << i, false;
  reader.consume(n);
  return true;
}

TEST(RingBuffer, HoldsItsCapacityThenIsFullUntilARecordIsConsumed) {
  Ring ring(1);
  auto writer = ring.writer();
  auto reader = ring.reader(0);
  EXPECT_EQ(reader.peek(1), nullptr);
  for (size_t record = 0; record < kCapacity / kLine; ++record) ASSERT_TRUE(put(writer, record, kLine)) << record;
  EXPECT_FALSE(put(writer, 16, 1));
  EXPECT_TRUE(get(reader, 0, kLine));
  EXPECT_TRUE(put(writer, 16, 1));
  EXPECT_FALSE(put(writer, 17, 1));
  for (size_t record = 1; record < 16; ++record) ASSERT_TRUE(get(reader, record, kLine)) << record;
  EXPECT_TRUE(get(reader, 16, 1));
  EXPECT_EQ(reader.peek(1), nullptr);
}

TEST(RingBuffer, ARecordThatWouldWrapLiesWholeAtTheStart) {
  Ring ring(1);
  auto writer = ring.writer();
  auto reader = ring.reader(0);
  ASSERT_TRUE(put(writer, 0, 500) && get(reader, 0, 500));  // 512 are left
  ASSERT_TRUE(put(writer, 1, 300) && get(reader, 1, 300));  // 192 are left
  EXPECT_EQ(writer.reserve(200), ring.data);
  ASSERT_TRUE(put(writer, 2, 200));
  EXPECT_EQ(reader.peek(200), ring.data);
  EXPECT_TRUE(get(reader, 2, 200));
}

TEST(RingBuffer, RecordsOfAnySizeArriveInOrderAndInsideTheRing) {
  std::mt19937_64 random(test::run_seed());
  Ring ring(1);
  auto writer = ring.writer();
  auto reader = ring.reader(0);
  std::vector<size_t> sizes;
  size_t received = 0;
  while (received < 20000) {
    if (random() % 2) {
      const size_t n = random() % (kCapacity / 2 + 1);
      std::byte* to = writer.reserve(n);
      if (!to) continue;
      ASSERT_EQ((to - ring.data) % kLine, 0u);
      ASSERT_LE(to + n, ring.data + kCapacity);
      ASSERT_TRUE(put(writer, sizes.size(), n));
      sizes.push_back(n);
    } else if (received < sizes.size()) {
      ASSERT_TRUE(get(reader, received, sizes[received])) << "record " << received << " did not come";
      ++received;
    }
  }
}

TEST(RingBuffer, TheSlowestReaderDecidesWhetherThereIsRoom) {
  Ring ring(3);
  auto writer = ring.writer();
  RingReader readers[] = {ring.reader(0), ring.reader(1), ring.reader(2)};
  ASSERT_TRUE(put(writer, 0, 512) && put(writer, 1, 512));
  for (int fast : {0, 2}) ASSERT_TRUE(get(readers[fast], 0, 512) && get(readers[fast], 1, 512));
  EXPECT_FALSE(put(writer, 2, 1));
  EXPECT_TRUE(get(readers[1], 0, 512));
  EXPECT_TRUE(put(writer, 2, 512));
  EXPECT_TRUE(get(readers[0], 2, 512) && get(readers[2], 2, 512));
  EXPECT_TRUE(get(readers[1], 1, 512) && get(readers[1], 2, 512));
}

TEST(RingBuffer, NobodyElseReadsARingWithoutReaders) {
  Ring ring(0);
  auto writer = ring.writer();
  for (size_t record = 0; record < 1000; ++record) ASSERT_TRUE(put(writer, record, 512));
}

TEST(RingBuffer, OneThreadWritesAndThreeReadEverything) {
  constexpr size_t kRecords = 2000;
  const auto size_in = [](size_t record) { return record * 37 % (kCapacity / 2 + 1); };
  Ring ring(3);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  const auto until_deadline = [&](const std::function<bool(size_t record)>& one) {
    for (size_t record = 0; record < kRecords;) {
      if (one(record)) ++record;
      else if (std::chrono::steady_clock::now() > deadline) return ADD_FAILURE() << "stuck at " << record, void();
      else std::this_thread::yield();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      auto reader = ring.reader(i);
      until_deadline([&](size_t record) { return get(reader, record, size_in(record)); });
    });
  auto writer = ring.writer();
  until_deadline([&](size_t record) { return put(writer, record, size_in(record)); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace lightcc
