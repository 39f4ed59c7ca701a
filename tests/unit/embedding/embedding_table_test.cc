// A table of one rank against a dictionary, and what its parts promise.
#include <cmath>
#include <random>
#include <unordered_map>

#include "unit/embedding/table_handles.h"
#include "labels.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

TEST(EmbeddingTable, EqualsADictionaryUnderInsertEraseAndGrowth) {
  Ranks one(1, Spec{.dim = 3, .init = LIGHTCC_EMBEDDING_ZEROS});
  Table* table = one.tables[0];
  std::unordered_map<int64_t, double> expected;
  std::mt19937_64 random(5);
  for (int step = 0; step < 300; ++step) {
    std::map<int64_t, bool> keys;  // small ones come again, large ones are any of 2^64
    for (int i = 0; i < 200; ++i) keys[random() % 2 ? int64_t(random() % 3000) : int64_t(random())] = true;
    std::vector<int64_t> batch;
    std::vector<double> g;
    for (auto& [key, here] : keys) batch.push_back(key), g.insert(g.end(), 3, double(key % 1000));
    Call* call = one.update(0, batch, g, 0, {1.0});
    ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
    release({call});
    for (int64_t key : batch) expected[key] -= double(key % 1000);
    std::vector<int64_t> gone;
    for (int i = 0; i < 60; ++i)
      gone.push_back(random() % 2 ? int64_t(random() % 3000) : batch[random() % batch.size()]);
    lightcc_embedding_erase(table, gone.data(), int64_t(gone.size()));
    for (int64_t key : gone) expected.erase(key);
  }
  ASSERT_EQ(table->shard->index().size(), expected.size());
  for (auto& [key, value] : expected) {
    uint8_t found = 0;
    lightcc_embedding_contains(table, &key, 1, &found);
    ASSERT_TRUE(found) << key;
    ASSERT_EQ(read(table, {key}), std::vector<double>(3, value)) << key;
  }
}

TEST(EmbeddingTable, ExportAndImportKeepEveryBit) {
  Ranks from(1, Spec{.rule = LIGHTCC_EMBEDDING_GROUP_ADAM}), to(1, Spec{.rule = LIGHTCC_EMBEDDING_GROUP_ADAM});
  std::vector<int64_t> keys;
  for (int64_t i = -700; i < 700; ++i) keys.push_back(i * 1000003);
  Call* call = from.update(0, keys, std::vector<double>(keys.size() * 4, 0.25), 0, {0.1, 0.9, 0.999, 1e-8});
  ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
  release({call});
  std::vector<int64_t> k(100);
  std::vector<uint32_t> counts(100), lasts(100);
  std::vector<double> w(400), m(400), v(400), z(400);
  lightcc_embedding_rows rows{sizeof rows, 0, 100, 0, 0, 0, k.data(), nullptr, counts.data(), lasts.data(), w.data(),
                              {m.data(), v.data(), z.data(), nullptr}};
  int64_t all = 0;
  do {
    ASSERT_EQ(lightcc_embedding_export(from.tables[0], &rows), 0);
    all += rows.count;
    ASSERT_EQ(lightcc_embedding_import(to.tables[0], &rows), 0) << lightcc_embedding_error();
    ASSERT_EQ(rows.taken, rows.count);
  } while (rows.count);
  EXPECT_EQ(all, int64_t(keys.size()));
  EXPECT_EQ(read(from.tables[0], keys), read(to.tables[0], keys));
  for (int64_t key : keys) {
    Shard::Record a, b;
    from.tables[0]->shard->find({&key, 1}, nullptr, &a);
    to.tables[0]->shard->find({&key, 1}, nullptr, &b);
    ASSERT_EQ(std::memcmp(a, b, 16 + 4 * 4 * 8), 0);
  }
}

TEST(EmbeddingTable, FirstValuesHaveTheirDistribution) {
  const FirstValues normal(Init::normal, 1, 2, 3, "t"), uniform(Init::uniform, -1, 3, 3, "t");
  double sum = 0, squares = 0, low = 9, high = -9;
  std::vector<double> row(16);
  for (int64_t key = 0; key < 10000; ++key) {
    normal.fill(key, 16, row.data());
    for (double x : row) sum += x, squares += (x - 1) * (x - 1);
    uniform.fill(key, 16, row.data());
    for (double x : row) low = std::min(low, x), high = std::max(high, x);
  }
  EXPECT_NEAR(sum / 160000, 1, 0.02);
  EXPECT_NEAR(std::sqrt(squares / 160000), 2, 0.02);
  EXPECT_GE(low, -1);
  EXPECT_LT(high, 3);
  EXPECT_GT(high - low, 3.99);
}

TEST(EmbeddingTable, MemoryReturnsWhenRowsAreErased) {
  Ranks one(1, Spec{.dim = 1000});
  std::vector<int64_t> keys(10000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = int64_t(i);
  Call* call = one.update(0, keys, std::vector<double>(keys.size() * 1000, 1), 0);
  ASSERT_EQ(lightcc_embedding_finish(call, 0), 0);
  release({call});
  lightcc_embedding_stats stats{};
  stats.size = sizeof stats;
  lightcc_embedding_get_stats(one.tables[0], &stats);
  EXPECT_GT(stats.slabs, 1);
  lightcc_embedding_erase(one.tables[0], keys.data(), int64_t(keys.size()));
  lightcc_embedding_get_stats(one.tables[0], &stats);
  EXPECT_EQ(stats.slabs, 0);
  EXPECT_EQ(stats.rows, 0);
}

TEST(EmbeddingTable, AnUpdateThatDoesNotFitLeavesTheTableUsable) {
  Ranks one(1, Spec{.limit_bytes = 64 * 10});
  std::vector<int64_t> few{1, 2, 3}, many(100);
  for (size_t i = 0; i < many.size(); ++i) many[i] = int64_t(i);
  Call* call = one.update(0, few, std::vector<double>(12, 1), 0);
  EXPECT_EQ(lightcc_embedding_finish(call, 0), 0);
  release({call});
  const auto before = read(one.tables[0], many);
  std::vector<double> g(400, 1);
  lightcc_embedding_gradient gradient{nullptr, 0, many.data(), nullptr, 100, g.data()};
  lightcc_embedding_step s{sizeof s, 1, one.tables[0], &gradient, 0.1, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(lightcc_embedding_update(one.groups[0].get(), &s, 1, 0, &call), LIGHTCC_INTERNAL);
  EXPECT_NE(std::string(lightcc_embedding_error()).find("table 't': memory does not suffice"), std::string::npos);
  EXPECT_EQ(read(one.tables[0], many), before);
  EXPECT_EQ(one.tables[0]->shard->steps().now(), 1u);
}

TEST(EmbeddingOwners, MoveAsFewAsCanBe) {
  const auto share_moved = [](int before, int after) {
    const Owners owners = first_owners(before);
    std::vector<int32_t> stay(size_t(before), -1);
    for (int rank = 0; rank < std::min(before, after); ++rank) stay[size_t(rank)] = rank;
    const Owners moved = move_owners(owners, stay, after);
    std::vector<int> had(size_t(after), 0);
    int differ = 0;
    for (int i = 0; i < kBuckets; ++i) differ += moved[size_t(i)] != owners[size_t(i)], ++had[moved[size_t(i)]];
    const auto [least, most] = std::minmax_element(had.begin(), had.end());
    EXPECT_LE(*most - *least, 1);
    return double(differ) / kBuckets;
  };
  EXPECT_NEAR(share_moved(4, 5), 0.20, 1e-4);
  EXPECT_NEAR(share_moved(4, 3), 0.25, 1e-4);
  EXPECT_EQ(share_moved(4, 4), 0);
}

}  // namespace
}  // namespace lightcc::embedding::test
