// Several ranks of a group, one after the other: what is asked, answered, summed, refused and served.
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

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

// The keys of training lookups are known to their owners: gradients refer to them, in whatever mixture.
struct Referring {
  explicit Referring(int size, int rule = LIGHTCC_EMBEDDING_SPARSE_ADAM)
      : known(size, Spec{.rule = rule, .terms = 192}), told(size, Spec{.rule = rule, .terms = 192}) {}
  ~Referring() {
    for (auto& calls : lookups) release(calls);
  }
  size_t lookup(uint32_t flags = kTraining) {
    std::vector<Call*> calls;
    for (int rank = 0; rank < int(known.tables.size()); ++rank)
      calls.push_back(known.lookup(rank, keys_of(int(random() % 4)), flags));
    EXPECT_EQ(finish(calls), std::vector<int>(calls.size(), 0)) << lightcc_embedding_error();
    lookups.push_back(calls);
    return lookups.size() - 1;
  }
  // Each rank's gradient is of one of the lookups, or of none (-1); the other table is told the keys themselves.
  void update(const std::vector<int>& of, uint32_t flags = 0) {
    const Numbers n{0.125, 0.5, 0.75, 1e-8, 0, 0, 0};
    std::vector<Call*> refer, tell;
    std::vector<std::vector<double>> g(of.size());
    for (size_t rank = 0; rank < of.size(); ++rank) {
      Call* lookup = of[rank] < 0 ? nullptr : lookups[size_t(of[rank])][rank];
      const std::vector<int64_t> keys = lookup ? test::keys_of(lookup) : std::vector<int64_t>();
      for (size_t i = 0; i < keys.size() * 4; ++i) g[rank].push_back(double(random() % 8));
      refer.push_back(known.update(int(rank), {lookup, 0, nullptr, nullptr, 0, g[rank].data()}, flags, n));
      tell.push_back(told.update(int(rank), keys, g[rank], flags, n));
    }
    EXPECT_EQ(finish(refer), std::vector<int>(of.size(), 0)) << lightcc_embedding_error();
    EXPECT_EQ(finish(tell), std::vector<int>(of.size(), 0)) << lightcc_embedding_error();
    release(refer);
    release(tell);
  }
  void expect_equal_rows() {
    std::vector<int64_t> all;
    for (int64_t key = -5; key < 40; ++key) all.push_back(key);
    for (size_t rank = 0; rank < known.tables.size(); ++rank) {
      EXPECT_EQ(read(known.tables[rank], all), read(told.tables[rank], all));
      EXPECT_EQ(known.tables[rank]->shard->index().size(), told.tables[rank]->shard->index().size());
    }
  }
  Ranks known, told;
  std::vector<std::vector<Call*>> lookups;
  std::mt19937 random{5};
};

// What is released before it is done ends in the background, without the caller's memory.
TEST(EmbeddingExchange, AnUpdateThatIsReleasedNeedsItsGradientsNoMore) {
  Ranks ranks(2);
  const std::vector<int64_t> keys = keys_of(0);
  const std::vector<Call*> lookups{ranks.lookup(0, keys, kTraining), ranks.lookup(1, keys, kTraining)};
  ASSERT_EQ(finish(lookups), std::vector<int>(2, 0));
  std::vector<double> expected = rows_of(lookups[0], 4);
  for (double& x : expected) x -= 0.1 * 2.0;
  std::vector<double> g(unique(keys).size() * 4, 1.0), kept = g;
  Call* released = ranks.update(0, {lookups[0], 0, nullptr, nullptr, 0, g.data()}, 0);
  release({released});
  std::fill(g.begin(), g.end(), 1e9);
  Call* update = ranks.update(1, {lookups[1], 0, nullptr, nullptr, 0, kept.data()}, 0);
  const std::vector<Call*> after{update, ranks.lookup(0, keys, 0), ranks.lookup(1, keys, 0)};
  ASSERT_EQ(finish(after), std::vector<int>(3, 0)) << lightcc_embedding_error();
  const std::vector<Call*> again{ranks.lookup(0, keys, 0), ranks.lookup(1, keys, 0)};
  ASSERT_EQ(finish(again), std::vector<int>(2, 0));
  EXPECT_EQ(rows_of(again[0], 4), expected);
  release(lookups), release(after), release(again);
}

TEST(EmbeddingExchange, GradientsOfALookupNeedNoKeys) {
  for (int size : {2, 3, 4}) {
    Referring r(size);
    for (int step = 0; step < 6; ++step) r.update(std::vector<int>(size_t(size), int(r.lookup())));
    for (Table* table : r.known.tables) EXPECT_EQ(table->asked.size(), 0u);
    r.expect_equal_rows();
  }
}

TEST(EmbeddingExchange, RanksMayReferToDifferentLookupsOrToNone) {
  Referring r(3);
  const int first = int(r.lookup()), second = int(r.lookup()), third = int(r.lookup());
  r.update({first, -1, -1});
  r.update({second, third, -1});
  r.update({-1, first, second});  // both were forgotten: their keys travel again
  r.update({-1, -1, -1});
  r.expect_equal_rows();
}

TEST(EmbeddingExchange, ALookupThatIsTooOldIsNotReferredTo) {
  Referring r(2);
  for (int i = 0; i < 40; ++i) r.lookup();
  for (Table* table : r.known.tables) EXPECT_EQ(table->asked.size(), 16u);
  r.update({39, 20});
  r.update({38, 0});
  r.update({27, 26});
  r.expect_equal_rows();
}

TEST(EmbeddingExchange, RowsMayBeErasedAndBornBetweenALookupAndItsUpdate) {
  Referring r(2);
  r.update({int(r.lookup()), -1});
  const int early = int(r.lookup()), late = int(r.lookup());
  r.update({late, late});
  for (auto* ranks : {&r.known, &r.told})
    for (Table* table : ranks->tables) {
      const std::vector<int64_t> some{1, 2, 3, 4, 5, 6};
      lightcc_embedding_erase(table, some.data(), int64_t(some.size()));
    }
  r.update({early, early});
  r.expect_equal_rows();
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

std::vector<Call*> updates_of_all(Ranks& ranks, double gradient, uint32_t flags) {
  std::vector<Call*> updates;
  for (int rank : {0, 1}) updates.push_back(ranks.update(rank, {1, 2}, std::vector<double>(8, gradient), flags, {1.0}));
  return updates;
}

void expect_rows(Ranks& ranks, double expected) {
  const std::vector<Call*> lookups{ranks.lookup(0, {1, 2}, 0), ranks.lookup(1, {1, 2}, 0)};
  EXPECT_EQ(finish(lookups), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  for (Call* lookup : lookups) EXPECT_EQ(rows_of(lookup, 4), std::vector<double>(8, expected));
  release(lookups);
}

TEST(EmbeddingExchange, UpdatesThatOverlapAreAllApplied) {
  for (const bool released : {false, true})
    for (const int ahead : {-1, 0, 1}) {  // this rank has collected the first one before the second one begins
      Ranks ranks(2, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
      const std::vector<Call*> first = updates_of_all(ranks, 1, 0);
      if (ahead >= 0) {
        EXPECT_EQ(lightcc_embedding_finish(first[size_t(ahead)], 0), LIGHTCC_PENDING);
      }
      const std::vector<Call*> second = updates_of_all(ranks, 3, 0);
      if (released) release(first);
      EXPECT_EQ(finish(second), (std::vector<int>{0, 0})) << lightcc_embedding_error();
      if (!released) {
        EXPECT_EQ(finish(first), (std::vector<int>{0, 0})) << lightcc_embedding_error();
        release(first);
      }
      release(second);
      expect_rows(ranks, -8);
    }
}

TEST(EmbeddingExchange, AHeldUpdateOutlivesTheEndOfAnEarlierOne) {
  Ranks ranks(2, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
  const std::vector<Call*> first = updates_of_all(ranks, 1, 0), held = updates_of_all(ranks, 3, LIGHTCC_EMBEDDING_HOLD);
  EXPECT_EQ(finish(held), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  EXPECT_EQ(finish(first), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  expect_rows(ranks, -2);
  for (Call* call : held) EXPECT_EQ(lightcc_embedding_apply(call, 0.5, 0), 0) << lightcc_embedding_error();
  EXPECT_EQ(finish(held), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  release(first), release(held);
  expect_rows(ranks, -5);
}

TEST(EmbeddingExchange, AnUpdateThatEndsWhileOneIsHeldIsRefusedOnAllRanks) {
  Ranks ranks(2, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
  const std::vector<Call*> held = updates_of_all(ranks, 1, LIGHTCC_EMBEDDING_HOLD), late = updates_of_all(ranks, 3, 0);
  EXPECT_EQ(finish(held), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  EXPECT_EQ(finish(late), (std::vector<int>{LIGHTCC_INVALID_ARGUMENT, LIGHTCC_INVALID_ARGUMENT}));
  EXPECT_STREQ(lightcc_embedding_error(), "rank 0: an update is held: apply or discard it first");
  for (Call* call : held) EXPECT_EQ(lightcc_embedding_apply(call, 1, 0), 0) << lightcc_embedding_error();
  EXPECT_EQ(finish(held), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  release(held), release(late);
  expect_rows(ranks, -2);
}

TEST(EmbeddingExchange, RanksThatScaleAHeldUpdateDifferentlyForgetIt) {
  Ranks ranks(2, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
  const std::vector<Call*> held = updates_of_all(ranks, 1, LIGHTCC_EMBEDDING_HOLD);
  EXPECT_EQ(finish(held), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  for (size_t rank : {0, 1}) EXPECT_EQ(lightcc_embedding_apply(held[rank], rank ? 1e-8 : 2e-8, 0), 0);
  EXPECT_EQ(finish(held), (std::vector<int>{LIGHTCC_MISMATCH, LIGHTCC_MISMATCH}));
  const std::vector<Call*> next = updates_of_all(ranks, 3, 0);
  EXPECT_EQ(finish(next), (std::vector<int>{0, 0})) << lightcc_embedding_error();
  release(held), release(next);
  expect_rows(ranks, -6);
}

TEST(EmbeddingExchange, RowsOfMoreThanAMessageHoldsAreRefusedOnAllRanks) {
  Ranks ranks(2, Spec{.dim = 1 << 20});  // 8 MiB a row
  std::vector<int64_t> keys;
  for (int64_t key = 0; keys.size() < 260; ++key)
    if (owner_of(ranks.tables[0]->owners, key) == 1) keys.push_back(key);
  const std::vector<Call*> lookups{ranks.lookup(0, keys, 0), ranks.lookup(1, {}, 0)};
  EXPECT_EQ(finish(lookups), (std::vector<int>{LIGHTCC_INVALID_ARGUMENT, LIGHTCC_INVALID_ARGUMENT}));
  EXPECT_STREQ(lightcc_embedding_error(), "rank 1: more than 2 GiB for one rank: use smaller batches");
  release(lookups);
}

TEST(EmbeddingExchange, AMessageWithoutMemoryIsRefusedOnAllRanks) {
  Ranks ranks(2);
  std::vector<int64_t> keys(200);
  std::iota(keys.begin(), keys.end(), 0);
  for (const size_t most : {size_t(1000), size_t(3500), SIZE_MAX}) {  // of no keys, of keys but not of rows
    ranks.hub.most_bytes = most;
    const std::vector<Call*> lookups{ranks.lookup(0, keys, 0), ranks.lookup(1, keys, 0)};
    const int expected = most == SIZE_MAX ? 0 : LIGHTCC_INTERNAL;
    EXPECT_EQ(finish(lookups), (std::vector<int>{expected, expected})) << most;
    if (expected) {
      EXPECT_STREQ(lightcc_embedding_error(), "rank 0: memory does not suffice for a message of embedding tables");
    }
    release(lookups);
  }
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
    for (int turn = 0; turn < 4; ++turn) {
      if (turn == 2) update = ranks.update(0, keys, std::vector<double>(80, 1), 0, {1.0});
      Call* serve = ranks.serve(1);
      std::vector<Call*> under_way{serve};
      if (turn != 1) under_way.insert(under_way.begin(), turn == 0 ? lookup : turn == 2 ? update : next);
      const auto status = finish(under_way);
      EXPECT_EQ(status, std::vector<int>(status.size(), 0)) << lightcc_embedding_error();
      served.push_back(serve->served);
      release({serve});
    }
    EXPECT_EQ(served, (std::vector<int>{LIGHTCC_EMBEDDING_SERVED_TRAINING, LIGHTCC_EMBEDDING_SERVED_LOOKUP,
                                        LIGHTCC_EMBEDDING_SERVED_UPDATE, LIGHTCC_EMBEDDING_SERVED_TRAINING}));
    EXPECT_EQ(rows_of(next, 4), std::vector<double>(80, -(step + 1)));
    release({lookup, next, update});
  }
  std::vector<Call*> both{ranks.serve(0), ranks.serve(1)};
  EXPECT_EQ(finish(both), (std::vector<int>{0, 0}));
  for (Call* call : both) EXPECT_EQ(call->served, LIGHTCC_EMBEDDING_SERVED_END);
  release(both);
}

TEST(EmbeddingServe, ItIsNotTheEndWhileARankHasAStepToEnd) {
  Ranks ranks(2);
  std::vector<Call*> calls{ranks.serve(0, LIGHTCC_EMBEDDING_PREFETCH), ranks.serve(1)};
  EXPECT_EQ(finish(calls), (std::vector<int>{0, 0}));
  for (Call* call : calls) EXPECT_EQ(call->served, LIGHTCC_EMBEDDING_SERVED_LOOKUP);
  release(calls);
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

// A rank that dies in an update leaves the others as they were, as long as it has told none that it can take the step.
TEST(EmbeddingExchange, NothingIsAppliedBeforeAllHaveSaidThatTheyCan) {
  Ranks ranks(3, Spec{.init = LIGHTCC_EMBEDDING_ZEROS});
  std::vector<Call*> updates;
  const std::vector<double> g(20, 1);
  for (int rank = 0; rank < 3; ++rank) updates.push_back(ranks.update(rank, {1, 2, 3, 4, 5}, g, 0));
  for (int turn = 0; turn < 20; ++turn)  // rank 2 has sent its gradients, and dies
    for (size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(lightcc_embedding_finish(updates[rank], 0), LIGHTCC_PENDING);
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(ranks.tables[rank]->shard->index().size(), 0u);
    EXPECT_EQ(ranks.tables[rank]->shard->steps().now(), 0u);
  }
  EXPECT_EQ(finish(updates), std::vector<int>(3, 0));  // it has not died after all
  size_t rows = 0;
  for (Table* table : ranks.tables) rows += table->shard->index().size();
  EXPECT_EQ(rows, 5u);
  release(updates);
}

}  // namespace
}  // namespace lightcc::embedding::test
