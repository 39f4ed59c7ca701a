// Counting in a filter of a fixed size, against dictionaries and the exact counts.
#include <algorithm>
#include <random>
#include <tuple>

#include "labels.h"
#include "unit/embedding/table_handles.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

constexpr int64_t kFilterStep = int64_t(kBuckets) * 64;

KeyFilter filter_of(int64_t lines, int hashes, int bits) {
  KeyFilter filter;
  filter.set_shape({lines, hashes, bits});
  return filter;
}

// As an update does.
void count_once(KeyFilter& filter, int64_t key, uint32_t most) {
  filter.reserve(std::vector<int64_t>{key});
  const uint32_t count = std::min(filter.count(key) + 1, most);
  filter.raise(key, count, [&](int64_t cell, uint32_t counters) { filter.set_cell(cell, counters); });
}

using Cells = std::map<int64_t, uint32_t>;
Cells cells_of(const KeyFilter& filter, int readers = 0) {
  Cells cells;
  for (int part = 0; part < KeyFilter::kParts; ++part)
    filter.each(part, readers, [&](int64_t cell, uint32_t counters) { cells[cell] = counters; });
  return cells;
}

TEST(EmbeddingFilter, NeverCountsTooLow) {
  for (int bits : {2, 4, 8, 16}) {
    KeyFilter filter = filter_of(1, 6, bits);
    const uint32_t most = (1u << bits) - 1;
    std::map<int64_t, uint32_t> counts;
    std::mt19937_64 random(5);
    for (int turn = 0; turn < 300000; ++turn) {
      const int64_t key = int64_t(random() % 60000) * 7919;
      count_once(filter, key, most);
      ++counts[key];
    }
    size_t too_high = 0;
    for (auto [key, count] : counts) {
      ASSERT_GE(filter.count(key), std::min(count, most));
      too_high += filter.count(key) > std::min(count, most);
    }
    EXPECT_LE(too_high, counts.size() / 1000) << bits;
  }
}

// The numbers are those of Bloom(4 << 20, 0.01) for these widths (tests/python/test_embedding_bloom.py).
TEST(EmbeddingFilter, ErrsAsOftenAsItIsSaidTo) {
  for (auto [bits, hashes, keys] : {std::tuple(2, 6, 1648520), {4, 6, 780609}, {8, 6, 351984}, {16, 5, 147298}}) {
    KeyFilter filter = filter_of(1, hashes, bits);
    for (int64_t key = 0; key < keys; ++key) count_once(filter, key, 1);
    int64_t wrong = 0;
    for (int64_t key = 0; key < 100000; ++key) wrong += filter.count(-1 - key) > 0;
    EXPECT_LE(wrong, 1100) << bits;  // of 1 % three deviations more are 1,095
    EXPECT_GE(wrong, 800) << bits;
    EXPECT_NEAR(double(filter.keys(kBuckets)), keys, 0.005 * keys) << bits;
  }
}

TEST(EmbeddingFilter, ItsMemoryIsFixed) {
  KeyFilter filter = filter_of(1, 4, 2);
  size_t before = 0;
  for (int64_t key = 0; key < 2000000; ++key) {
    count_once(filter, key, 3);
    if (key == 1000000) before = filter.bytes();
  }
  EXPECT_EQ(filter.bytes(), before);
  EXPECT_LE(filter.bytes(), size_t(kFilterStep) * 120 / 100);
}

TEST(EmbeddingFilter, CellsMakeAnEqualFilter) {
  for (int64_t lines : {1, 3, 20000}) {
    KeyFilter filter = filter_of(lines, 9, 4), other = filter_of(lines, 9, 4);
    for (int64_t key = 0; key < 30; ++key)
      for (int64_t i = 0; i <= key % 20; ++i) count_once(filter, key, 15);
    const Cells cells = cells_of(filter);
    for (auto [cell, counters] : cells) other.set_cell(cell, counters);
    EXPECT_EQ(cells_of(other), cells);
    for (int64_t key = 0; key < 30; ++key) EXPECT_EQ(other.count(key), filter.count(key));
    filter.has_read_all(1);
    EXPECT_EQ(cells_of(filter, 1).size(), 0u);
    EXPECT_EQ(cells_of(filter, 2), cells);
    count_once(filter, 77, 15);
    EXPECT_GE(cells_of(filter, 1).size(), 1u);
    EXPECT_LE(cells_of(filter, 1).size(), 9u);
    for (auto [cell, counters] : cells_of(filter)) filter.has_read(cell, 2);
    EXPECT_EQ(cells_of(filter, 2).size(), 0u);
    EXPECT_EQ(cells_of(filter, 3), cells_of(filter, 1));
    for (auto [cell, counters] : cells_of(filter)) filter.set_cell(cell, 0);
    EXPECT_EQ(cells_of(filter).size(), 0u);
    EXPECT_EQ(filter.keys(kBuckets), 0);
    EXPECT_EQ(filter.count(5), 0u);
  }
}

// A bucket between two of its cells has no counters that are not zero.
TEST(EmbeddingFilter, ABucketMayBeEmptyForAMoment) {
  KeyFilter filter = filter_of(1, 1, 16);
  filter.set_cell(3, 7);
  filter.set_cell(3, 0);
  filter.set_cell(4, 9);
  EXPECT_EQ(cells_of(filter), (Cells{{4, 9}}));
}

TEST(EmbeddingFilter, WidthsHoldCountsBelowMinCount) {
  for (auto [min_count, bits] : {std::tuple(2u, 2), {4u, 2}, {5u, 4}, {16u, 4}, {17u, 8}, {256u, 8}, {257u, 16},
                                 {65536u, 16}, {65537u, 0}})
    EXPECT_EQ(KeyFilter::bits_for(min_count), bits) << min_count;
}

// Some steps of some ranks; the keys of a step do not depend on the number of ranks.
struct Trained {
  std::map<int64_t, uint32_t> rows;  // with their updates
  Cells cells;
  explicit Trained(int size, int64_t filter_bytes, int64_t most_keys) {
    Ranks ranks(size, Spec{.dim = 1, .init = LIGHTCC_EMBEDDING_ZEROS});
    for (Table* table : ranks.tables) {
      EXPECT_EQ(lightcc_embedding_set_admission(table, 3, 0), 0);
      EXPECT_EQ(lightcc_embedding_set_filter(table, filter_bytes, 5), 0);
    }
    std::mt19937_64 random(8);
    for (int step = 0; step < 20; ++step) {
      std::vector<std::vector<int64_t>> keys(static_cast<size_t>(size));
      for (int i = 0; i < 4000; ++i) keys[size_t(i % size)].push_back(int64_t(random()) % most_keys);
      std::vector<Call*> calls;
      for (int rank = 0; rank < size; ++rank) calls.push_back(ranks.lookup(rank, keys[size_t(rank)], 1));
      EXPECT_EQ(finish(calls), std::vector<int>(size_t(size), 0)) << lightcc_embedding_error();
      std::vector<Call*> updates;
      std::vector<std::vector<double>> gradients;  // they are read until the updates are done
      for (int rank = 0; rank < size; ++rank) {
        gradients.emplace_back(test::keys_of(calls[size_t(rank)]).size(), 1);
        lightcc_embedding_gradient gradient{calls[size_t(rank)], 0, nullptr, nullptr, 0, gradients.back().data()};
        updates.push_back(ranks.update(rank, gradient, 0));
      }
      EXPECT_EQ(finish(updates), std::vector<int>(size_t(size), 0)) << lightcc_embedding_error();
      release(updates);
      release(calls);
    }
    for (Table* table : ranks.tables) {
      const Slabs& records = table->shard->records();
      for (uint32_t row = records.next_taken(0); row != Slabs::kNone; row = records.next_taken(row + 1))
        rows[records.header(row)->key] = records.header(row)->count;
      cells.merge(cells_of(table->admission.filter));
    }
  }
};

TEST(EmbeddingFilter, AnyNumberOfRanksLetInTheSameKeys) {
  const Trained one(1, kFilterStep, 50000);
  EXPECT_GT(one.cells.size(), 10000u);
  for (int size : {2, 3, 4}) {
    const Trained some(size, kFilterStep, 50000);
    EXPECT_EQ(some.rows, one.rows);
    EXPECT_EQ(some.cells, one.cells);
  }
}

TEST(EmbeddingFilter, ALargeOneLetsInWhatExactCountsDo) {
  EXPECT_EQ(Trained(2, 16 * kFilterStep, 20000).rows, Trained(2, 0, 20000).rows);
}

TEST(EmbeddingFilter, WrongNumbersAreRefused) {
  Ranks one(1);
  Table* table = one.tables[0];
  ASSERT_EQ(lightcc_embedding_set_admission(table, 3, 0), 0);
  for (auto [bytes, hashes] : {std::tuple(int64_t(1), 4), {kFilterStep + 64, 4}, {-kFilterStep, 4}, {kFilterStep, 0},
                               {kFilterStep, 33}, {kFilterStep << 21, 4}})
    EXPECT_EQ(lightcc_embedding_set_filter(table, bytes, hashes), LIGHTCC_INVALID_ARGUMENT) << bytes;
  ASSERT_EQ(lightcc_embedding_set_filter(table, kFilterStep, 4), 0);
  EXPECT_EQ(lightcc_embedding_set_admission(table, 65537, 0), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(table->admission.min_count, 3u);
  for (int64_t cell : {int64_t(-1), kFilterStep / 4, int64_t(1) << 62}) {
    const uint32_t counters = 1;
    EXPECT_EQ(lightcc_embedding_import_candidates(table, &cell, &counters, 1), LIGHTCC_INVALID_ARGUMENT) << cell;
  }
}

TEST(EmbeddingFilter, RanksThatCountDifferentlyAreTold) {
  Ranks ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_EQ(lightcc_embedding_set_admission(ranks.tables[size_t(rank)], 3, 0), 0);
    ASSERT_EQ(lightcc_embedding_set_filter(ranks.tables[size_t(rank)], kFilterStep * (1 + rank), 4), 0);
  }
  std::vector<Call*> calls{ranks.lookup(0, {1}, 0), ranks.lookup(1, {1}, 0)};
  EXPECT_EQ(finish(calls), std::vector<int>(2, LIGHTCC_MISMATCH));
  release(calls);
}

}  // namespace
}  // namespace lightcc::embedding::test
