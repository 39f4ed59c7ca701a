// Several ranks of a group, one after the other: what is asked, answered, summed, refused and served.
#include <cmath>
#include <limits>

#include "labels.h"
#include "unit/embedding/table_handles.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

constexpr uint32_t kTraining = LIGHTCC_EMBEDDING_TRAINING;

std::vector<int64_t> keys_of(int rank) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 50; ++i) keys.push_back((i * (rank + 1)) % 37 - 5);
  return keys;
}

std::vector<int64_t> unique(const std::vector<int64_t>& keys) {
  std::vector<int64_t> different(keys.size()), inverse(keys.size());
  different.resize(size_t(Dedup().run(keys, different.data(), inverse.data())));
  return different;
}

// Five steps of all ranks with gradients of small whole numbers, whose sums are exact; then all rows, as seen by rank
// 0.
std::vector<double> trained(int size, int rule) {
  Ranks ranks(size, Spec{.rule = rule, .terms = 192});
  const Numbers n{0.125, 0.5, 0.75, 1e-8, 0, 0, 0};
  for (int step = 0; step < 5; ++step) {
    std::vector<Call*> lookups, updates;
    for (int rank = 0; rank < size; ++rank) lookups.push_back(ranks.lookup(rank, keys_of(rank), kTraining));
    EXPECT_EQ(finish(lookups), std::vector<int>(size_t(size), 0)) << lightcc_embedding_error();
    for (int rank = 0; rank < 4; ++rank) {  // the data of four ranks, on however many there are
      if (rank >= size) continue;
      std::vector<int64_t> keys;
      std::vector<double> g;
      for (int data = rank; data < 4; data += size)
        for (int64_t key : keys_of(data)) keys.push_back(key);
      const std::vector<int64_t> different = unique(keys);
      for (int64_t key : different)
        g.insert(g.end(), 4, double(std::count(keys.begin(), keys.end(), key)) * double(step + 1) * 0.25);
      updates.push_back(ranks.update(rank, different, g, 0, n));
    }
    EXPECT_EQ(finish(updates), std::vector<int>(size_t(size), 0)) << lightcc_embedding_error();
    release(lookups);
    release(updates);
  }
  std::vector<int64_t> all;
  for (int64_t key = -5; key < 40; ++key) all.push_back(key);
  std::vector<Call*> lookups;
  for (int rank = 0; rank < size; ++rank) lookups.push_back(ranks.lookup(rank, all, 0));
  EXPECT_EQ(finish(lookups), std::vector<int>(size_t(size), 0));
  const auto rows = rows_of(lookups[0], 4);
  release(lookups);
  return rows;
}

TEST(EmbeddingExchange, RowsAreTheSameOnAnyNumberOfRanks) {
  for (int rule : {LIGHTCC_EMBEDDING_SGD, LIGHTCC_EMBEDDING_ADAGRAD, LIGHTCC_EMBEDDING_SPARSE_ADAM}) {
    const auto one = trained(1, rule);
    for (int size : {2, 3, 4}) EXPECT_EQ(trained(size, rule), one) << "rule " << rule << ", ranks " << size;
  }
}

TEST(EmbeddingExchange, AnEvaluationInsertsNothing) {
  Ranks ranks(2);
  std::vector<Call*> calls{ranks.lookup(0, {1, 2, 1}, 0), ranks.lookup(1, {3}, kTraining * 0)};
  EXPECT_EQ(finish(calls), (std::vector<int>{0, 0}));
  release(calls);
  for (Table* table : ranks.tables) EXPECT_EQ(table->shard->index().size(), 0u);
}

TEST(EmbeddingExchange, PrefetchedRowsAreThoseAfterTheUpdate) {
  Ranks ranks(2);
  std::vector<Call*> next, updates;
  for (int rank : {0, 1}) next.push_back(ranks.lookup(rank, {1, 2, 3}, kTraining | LIGHTCC_EMBEDDING_PREFETCH));
  for (int rank : {0, 1}) updates.push_back(ranks.update(rank, {1, 2, 3}, std::vector<double>(12, 1), 0));
  EXPECT_EQ(finish(updates), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  EXPECT_EQ(finish(next), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  std::vector<Call*> plain{ranks.lookup(0, {1, 2, 3}, 0), ranks.lookup(1, {}, 0)};
  EXPECT_EQ(finish(plain), (std::vector<int>{0, 0}));
  EXPECT_EQ(rows_of(next[0], 4), rows_of(plain[0], 4));
  release(next), release(updates), release(plain);
}

TEST(EmbeddingExchange, AGradientThatIsNotFiniteRefusesTheStepOnAllRanks) {
  Ranks ranks(3);
  const auto before = read(ranks.tables[0], {1, 2});
  std::vector<Call*> calls;
  for (int rank : {0, 1, 2}) {
    std::vector<double> g(8, 1);
    if (rank == 1) g[6] = std::numeric_limits<double>::quiet_NaN();
    calls.push_back(ranks.update(rank, {1, 2}, g, 0));
  }
  for (Call* call : calls) {
    (void)lightcc_embedding_finish(call, 0);
    EXPECT_EQ(lightcc_embedding_finish(call, 0), LIGHTCC_INVALID_ARGUMENT);
    EXPECT_STREQ(lightcc_embedding_error(),
                 "rank 1: table 't': the gradient of key 2 is not finite; nothing was applied");
  }
  release(calls);
  for (Table* table : ranks.tables) {
    EXPECT_EQ(table->shard->index().size(), 0u);
    EXPECT_EQ(table->shard->steps().now(), 0u);
  }
  EXPECT_EQ(read(ranks.tables[0], {1, 2}), before);
}

TEST(EmbeddingExchange, MemoryThatOneOwnerLacksRefusesTheStepOnAllRanks) {
  Ranks ranks(2, [](int rank) { return Spec{.limit_bytes = rank ? 64 * 4 : 0}; });
  std::vector<int64_t> keys(100);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = int64_t(i);
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<Call*> calls;
    for (int rank : {0, 1}) calls.push_back(ranks.update(rank, keys, std::vector<double>(400, 1), 0));
    EXPECT_EQ(finish(calls), (std::vector<int>{LIGHTCC_INTERNAL, LIGHTCC_INTERNAL}));
    release(calls);
  }
  std::vector<Call*> calls;
  for (int rank : {0, 1}) calls.push_back(ranks.update(rank, {1, 2}, std::vector<double>(8, 1), 0));
  EXPECT_EQ(finish(calls), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  release(calls);
  for (Table* table : ranks.tables) EXPECT_EQ(table->shard->steps().now(), 1u);
}

TEST(EmbeddingExchange, TablesThatDifferAreNamedOnEveryRank) {
  Ranks ranks(2, [](int rank) { return Spec{.name = "user", .dim = rank ? 4 : 8}; });
  std::vector<Call*> calls{ranks.lookup(0, {1}, 0), ranks.lookup(1, {1}, 0)};
  for (size_t i : {0, 1}) {
    EXPECT_EQ(lightcc_embedding_finish(calls[i], 0), LIGHTCC_MISMATCH);
    EXPECT_NE(std::string(lightcc_embedding_error()).find("table 'user' has another dim"), std::string::npos);
  }
  release(calls);
}

TEST(EmbeddingExchange, ASkippedStepIsTakenOnNoRank) {
  Ranks ranks(2);
  const double infinite = std::numeric_limits<double>::infinity();
  std::vector<Call*> calls{ranks.update(0, {1}, {1, 1, 1, 1}, 0),
                           ranks.update(1, {1}, {1, 1, 1, infinite}, LIGHTCC_EMBEDDING_SKIP)};
  EXPECT_EQ(finish(calls), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  for (Call* call : calls) {
    int skipped = 0;
    lightcc_embedding_get_sums(call, nullptr, &skipped);
    EXPECT_TRUE(skipped);
  }
  release(calls);
  for (Table* table : ranks.tables) EXPECT_EQ(table->shard->steps().now(), 0u);
}

TEST(EmbeddingExchange, AHeldUpdateTellsTheNormAndIsScaled) {
  Ranks ranks(2, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
  std::vector<Call*> calls;
  const std::vector<double> ones(8, 1);
  for (int rank : {0, 1}) calls.push_back(ranks.update(rank, {1, 2}, ones, LIGHTCC_EMBEDDING_HOLD, {1.0}));
  EXPECT_EQ(finish(calls), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  for (Call* call : calls) {
    double sum = 0;
    lightcc_embedding_get_sums(call, &sum, nullptr);
    EXPECT_EQ(sum, 8 * 4);  // each sum over two ranks is 2
    EXPECT_EQ(lightcc_embedding_apply(call, 0.25, 0), 0) << lightcc_embedding_error();
  }
  EXPECT_EQ(finish(calls), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  release(calls);
  std::vector<Call*> lookups{ranks.lookup(0, {1, 2}, 0), ranks.lookup(1, {}, 0)};
  EXPECT_EQ(finish(lookups), (std::vector<int>{0, 0}));
  EXPECT_EQ(rows_of(lookups[0], 4), std::vector<double>(8, -0.5));
  release(lookups);
}

TEST(EmbeddingServe, ARankWithoutDataAnswersUntilAllHaveEnded) {
  Ranks ranks(2, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
  std::vector<int64_t> keys(20);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = int64_t(i);
  for (int step = 0; step < 3; ++step) {
    std::vector<int> served;
    Call* lookup = ranks.lookup(0, keys, kTraining);
    Call* next = ranks.lookup(0, keys, kTraining | LIGHTCC_EMBEDDING_PREFETCH);
    Call* update = nullptr;
    for (int turn = 0; turn < 3; ++turn) {
      if (turn == 2) update = ranks.update(0, keys, std::vector<double>(80, 1), 0, {1.0});
      Call* serve = ranks.serve(1);
      std::vector<Call*> under_way{serve};
      if (turn != 1) under_way.insert(under_way.begin(), turn == 0 ? lookup : update);
      const auto status = finish(under_way);
      EXPECT_EQ(status, std::vector<int>(status.size(), 0)) << lightcc_embedding_error();
      served.push_back(serve->served);
      release({serve});
    }
    EXPECT_EQ(served, (std::vector<int>{LIGHTCC_EMBEDDING_SERVED_TRAINING, LIGHTCC_EMBEDDING_SERVED_TRAINING,
                                        LIGHTCC_EMBEDDING_SERVED_UPDATE}));
    EXPECT_EQ(finish({next}), std::vector<int>{0}) << lightcc_embedding_error();
    EXPECT_EQ(rows_of(next, 4), std::vector<double>(80, -(step + 1)));
    release({lookup, next, update});
  }
  std::vector<Call*> both{ranks.serve(0), ranks.serve(1)};
  EXPECT_EQ(finish(both), (std::vector<int>{0, 0}));
  for (Call* call : both) EXPECT_EQ(call->served, LIGHTCC_EMBEDDING_SERVED_END);
  release(both);
}

TEST(EmbeddingServe, APrefetchedLookupWithoutAnUpdateIsAnsweredToo) {
  Ranks ranks(2);
  Call* next = ranks.lookup(0, {1, 2, 3}, LIGHTCC_EMBEDDING_PREFETCH);
  Call* serve = ranks.serve(1);
  EXPECT_EQ(finish({serve}), std::vector<int>{0});
  Call* again = ranks.serve(1);
  EXPECT_EQ(finish({next, again}), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  release({next, serve, again});
}

}  // namespace
}  // namespace lightcc::embedding::test
