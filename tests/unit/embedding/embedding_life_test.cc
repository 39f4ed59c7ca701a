// Keys that are counted before they get a row, and rows that go.
#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "labels.h"
#include "unit/embedding/table_handles.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

TEST(EmbeddingKeyCounts, EqualADictionaryUnderSetAndErase) {
  KeyCounts candidates;
  std::map<int64_t, uint32_t> expected;
  std::mt19937_64 random(3);
  for (int turn = 0; turn < 40000; ++turn) {
    const int64_t key = int64_t(random() % 3000) << (random() % 2 ? 0 : 48);
    if (random() % 3) {
      ASSERT_TRUE(candidates.reserve(std::vector<int64_t>{key}));
      candidates.set(key, ++expected[key]);
    } else {
      candidates.erase(key);
      expected.erase(key);
    }
  }
  ASSERT_EQ(candidates.size(), expected.size());
  std::map<int64_t, uint32_t> held;
  for (int part = 0; part < KeyCounts::kStripes; ++part)
    candidates.each(part, 0, [&](int64_t key, uint32_t count) { held[key] = count; });
  EXPECT_EQ(held, expected);
  for (int64_t key = 0; key < 3000; ++key)
    EXPECT_EQ(candidates.count(key), expected.contains(key) ? expected[key] : 0);
}

TEST(EmbeddingKeyCounts, TakeTwelveBytesAPlaceAndAtMostEighteenAKey) {
  KeyCounts candidates;
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 200000; ++key) keys.push_back(key * 7919);
  for (size_t first = 0; first < keys.size(); first += 1000) {
    const std::span<const int64_t> some(keys.data() + first, 1000);
    ASSERT_TRUE(candidates.reserve(some));
    for (int64_t key : some) candidates.set(key, 1);
  }
  EXPECT_LE(candidates.bytes(), 18 * keys.size());
  EXPECT_GE(candidates.bytes(), 12 * keys.size());
}

TEST(EmbeddingKeyCounts, KnowWhatEachReaderHasNotRead) {
  KeyCounts candidates;
  const auto changed = [&](int readers) {
    std::set<int64_t> keys;
    for (int part = 0; part < KeyCounts::kStripes; ++part)
      candidates.each(part, readers, [&](int64_t key, uint32_t) { keys.insert(key); });
    return keys;
  };
  ASSERT_TRUE(candidates.reserve(std::vector<int64_t>{1, 2, 3}));
  for (int64_t key : {1, 2, 3}) candidates.set(key, KeyCounts::kMostCount);
  candidates.has_read_all(1);
  EXPECT_EQ(changed(1), (std::set<int64_t>{}));
  EXPECT_EQ(changed(2), (std::set<int64_t>{1, 2, 3}));
  candidates.has_read(3, 2);
  candidates.set(2, 5);
  EXPECT_EQ(changed(1), (std::set<int64_t>{2}));
  EXPECT_EQ(changed(2), (std::set<int64_t>{1, 2}));
  EXPECT_EQ(changed(3), (std::set<int64_t>{1, 2}));
  EXPECT_EQ(changed(0), (std::set<int64_t>{1, 2, 3}));
  EXPECT_EQ(candidates.count(1), KeyCounts::kMostCount);
}

TEST(EmbeddingAdmission, KeepsGradientsInTheirPlaces) {
  Ranks one(1, Spec{.dim = 2, .init = LIGHTCC_EMBEDDING_ZEROS});
  ASSERT_EQ(lightcc_embedding_set_admission(one.tables[0], 2, 0.25), 0);
  auto update = [&](std::vector<int64_t> keys, std::vector<double> g) {
    Call* call = one.update(0, keys, g, 0, {1.0});
    ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
    release({call});
  };
  update({5, 7}, {1, 1, 1, 1});
  EXPECT_EQ(read(one.tables[0], {5, 7, 9}), std::vector<double>(6, 0.25));
  update({9, 7, 8, 5}, {1, 1, 2, 3, 4, 4, 5, 6});
  EXPECT_EQ(read(one.tables[0], {9, 7, 8, 5}), (std::vector<double>{0.25, 0.25, -2, -3, 0.25, 0.25, -5, -6}));
  lightcc_embedding_stats stats{};
  stats.size = sizeof stats;
  ASSERT_EQ(lightcc_embedding_get_stats(one.tables[0], &stats), 0);
  EXPECT_EQ(stats.rows, 2);
  EXPECT_EQ(stats.candidates, 2);
  EXPECT_EQ(stats.admitted, 2);
}

TEST(EmbeddingAdmission, SumsOccurrencesOverRanks) {
  Ranks ranks(3, Spec{.dim = 1});
  for (Table* table : ranks.tables) ASSERT_EQ(lightcc_embedding_set_admission(table, 3, 0), 0);
  std::vector<Call*> calls;
  for (int rank = 0; rank < 3; ++rank)
    calls.push_back(ranks.update(rank, rank == 2 ? std::vector<int64_t>{1} : std::vector<int64_t>{1, 2},
                                 std::vector<double>(rank == 2 ? 1 : 2, 1.0), 0));
  EXPECT_EQ(finish(calls), std::vector<int>(3, 0)) << lightcc_embedding_error();
  release(calls);
  size_t rows = 0, counted = 0;
  for (Table* table : ranks.tables) {
    rows += table->shard->index().size();
    counted += table->admission.candidates.size();
  }
  EXPECT_EQ(rows, 1u);
  EXPECT_EQ(counted, 1u);
}

// What a list says must be the first step at which the row goes, if nothing happens to it meanwhile.
TEST(EmbeddingEviction, ARowIsDueWhenItGoes) {
  std::mt19937_64 random(11);
  for (int turn = 0; turn < 2000; ++turn) {
    EvictionRule rule;
    rule.kind = turn % 2 ? EvictionKind::ttl : EvictionKind::count;
    rule.a = turn % 2 ? double(1 + random() % 40) : 0.01 + double(random() % 1000) / 100;
    rule.b = 0.5 + double(random() % 49) / 100;
    const RowHeader header{int64_t(random()), uint32_t(1 + random() % 50) & 63, 0, uint32_t(100 + random() % 50)};
    const uint32_t now = header.last + uint32_t(random() % 100);
    uint32_t first = now + 1;
    while (!goes(rule, header, 0, first)) ++first;
    ASSERT_EQ(due_step(rule, header, now), first) << rule.a << " " << rule.b << " " << header.count;
  }
}

TEST(EmbeddingEviction, EachRowHasItsTurnOnceInSoManySteps) {
  EvictionRule rule{EvictionKind::l2, 1, 0, 10};
  std::map<uint32_t, int> rows;
  for (int64_t key = 0; key < 1000; ++key) {
    const RowHeader header{key, 1, 0, 5};
    const uint32_t due = due_step(rule, header, 57);
    ASSERT_TRUE(due > 57 && due <= 67);
    ASSERT_EQ(due_step(rule, header, due), due + 10);
    ++rows[due];
  }
  for (auto& [step, number] : rows) EXPECT_GT(number, 60) << step;
}

// As they are after a load, or where a table has gone back.
TEST(EmbeddingEviction, ListsThatAreMadeAnewLetTheSameRowsGo) {
  for (auto [kind, a, b, every] : {std::tuple(LIGHTCC_EMBEDDING_TTL, 3.0, 0.0, 1),
                                   {LIGHTCC_EMBEDDING_COUNT, 1.5, 0.7, 1}, {LIGHTCC_EMBEDDING_L2, 1.2, 0.0, 3},
                                   {LIGHTCC_EMBEDDING_L2, 1.2, 0.0, 1}, {LIGHTCC_EMBEDDING_ASKED, 0.0, 0.0, 4}}) {
    SCOPED_TRACE(std::to_string(kind) + " every " + std::to_string(every));
    Ranks kept(1, Spec{.dim = 2}), forgetful(1, Spec{.dim = 2});
    std::mt19937_64 random(4);
    for (Ranks* one : {&kept, &forgetful})
      ASSERT_EQ(lightcc_embedding_set_eviction(one->tables[0], kind, a, b, every), 0) << lightcc_embedding_error();
    for (int step = 0; step < 60; ++step) {
      std::set<int64_t> some;
      for (int i = 0; i < 20; ++i) some.insert(int64_t(random() % 80));
      const std::vector<int64_t> keys(some.begin(), some.end());
      std::set<int64_t> rows[2], due[2];
      for (int i : {0, 1}) {
        Ranks& one = i ? forgetful : kept;
        if (i && step % 3) one.tables[0]->eviction.forget();
        Call* call = one.update(0, keys, std::vector<double>(2 * keys.size(), 1.0), 0);
        ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
        release({call});
        const Slabs& records = one.tables[0]->shard->records();
        for (uint32_t row = records.next_taken(0); row != Slabs::kNone; row = records.next_taken(row + 1))
          rows[i].insert(records.header(row)->key);
        for (uint32_t row : one.tables[0]->eviction.due()) due[i].insert(records.header(row)->key);
      }
      ASSERT_EQ(rows[0], rows[1]) << step;
      ASSERT_EQ(due[0], due[1]) << step;
    }
    EXPECT_TRUE(kept.tables[0]->evicted || kind == LIGHTCC_EMBEDDING_ASKED);
  }
}

TEST(EmbeddingEviction, MemoryStaysWithNewKeysInEachStep) {
  Ranks one(1, Spec{.dim = 64, .init = LIGHTCC_EMBEDDING_ZEROS});
  Table* table = one.tables[0];
  ASSERT_EQ(lightcc_embedding_set_eviction(table, LIGHTCC_EMBEDDING_TTL, 10, 0, 1), 0);
  lightcc_embedding_stats early{}, late{};
  early.size = late.size = sizeof early;
  for (int step = 0; step < 300; ++step) {
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < 1000; ++i) keys.push_back(1000 * step + i);
    Call* call = one.update(0, keys, std::vector<double>(64 * keys.size(), 1.0), 0);
    ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
    release({call});
    if (step == 60) { EXPECT_EQ(lightcc_embedding_get_stats(table, &early), 0); }
  }
  ASSERT_EQ(lightcc_embedding_get_stats(table, &late), 0);
  EXPECT_EQ(late.rows, 10000);
  EXPECT_EQ(late.evicted, 290000);
  EXPECT_EQ(late.bytes, early.bytes);
}

TEST(EmbeddingEviction, WrongNumbersAreRefused) {
  Ranks one(1);
  for (auto [kind, a, b, every] : {std::tuple(1, 0.0, 0.0, 1), {2, 0.0, 0.5, 1}, {2, 1.0, 1.0, 1}, {3, 0.0, 0.0, 1},
                                   {3, 1.0, 0.0, 0}, {9, 1.0, 0.0, 1}})
    EXPECT_EQ(lightcc_embedding_set_eviction(one.tables[0], kind, a, b, every), LIGHTCC_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace lightcc::embedding::test
