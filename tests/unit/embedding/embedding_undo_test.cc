// Logs of what rows were, against copies of the table.
#include <algorithm>
#include <cstring>
#include <random>

#include "unit/embedding/table_handles.h"
#include "labels.h"

LABEL(alone);

namespace lightcc::embedding::test {
namespace {

using Rows = std::map<int64_t, std::string>;  // the bytes of each record

Rows rows_of(const Table& table) {
  Rows rows;
  const Slabs& records = table.shard->records();
  for (uint32_t row = records.next_taken(0); row != Slabs::kNone; row = records.next_taken(row + 1))
    rows[records.header(row)->key] = {reinterpret_cast<const char*>(records.at(row)), records.record_bytes()};
  return rows;
}

using Counts = std::map<int64_t, uint32_t>;

Counts candidates_of(Table& table) {
  Counts counts;
  for (int part = 0; part < LIGHTCC_EMBEDDING_CANDIDATE_PARTS; ++part) {
    int64_t count = 0;
    std::vector<int64_t> keys(1000);
    std::vector<uint32_t> seen(1000);
    EXPECT_EQ(lightcc_embedding_export_candidates(&table, part, 0, 1000, keys.data(), seen.data(), &count), 0);
    EXPECT_LE(count, 1000);
    for (size_t i = 0; i < size_t(count); ++i) counts[keys[i]] = seen[i];
  }
  return counts;
}

// Everything by which a table goes on.
struct Moment {
  Rows rows;
  Counts candidates;
  std::vector<double> alphas;
  Numbers numbers;
  explicit Moment(Table& t)
      : rows(rows_of(t)), candidates(candidates_of(t)), alphas(t.shard->steps().alphas()),
        numbers(t.shard->numbers()) {}
  bool operator==(const Moment&) const = default;
};

constexpr int64_t kFilterBytes = 4 << 20;

class RandomTraining {
 public:
  RandomTraining(int rule, unsigned seed, int64_t min_count = 1)
      : ranks(1, Spec{.dim = 3, .rule = rule, .initial = 0.1}), random_(seed) {
    EXPECT_EQ(lightcc_embedding_set_admission(table(), min_count, 0), 0);
  }
  Table* table() { return ranks.tables[0]; }
  void count_in_a_filter() { EXPECT_EQ(lightcc_embedding_set_filter(table(), kFilterBytes, 4), 0); }
  std::vector<int64_t> some_keys(size_t most) {
    std::map<int64_t, bool> keys;
    for (size_t i = random_() % most; i > 0; --i) keys[random_() % 4 ? int64_t(random_() % 500) : int64_t(random_())];
    std::vector<int64_t> all;
    for (auto& [key, unused] : keys) all.push_back(key);
    return all;
  }
  void step() {
    const std::vector<int64_t> keys = some_keys(80);
    Call* read = ranks.lookup(0, keys, LIGHTCC_EMBEDDING_TRAINING);
    ASSERT_EQ(lightcc_embedding_finish(read, 0), 0);
    if (random_() % 8) {  // a lookup without an update, too, writes what SparseAdam's rows have missed
      std::vector<double> g(keys.size() * 3);
      for (double& value : g) value = double(random_() % 1000) / 1000 - 0.5;
      Call* call = ranks.update(0, keys, g, 0, {0.1 / double(1 + random_() % 3), 0.9, 0.99, 1e-3, 1e-4, 0, 1e-4});
      ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
      release({call});
    }
    release({read});
    if (random_() % 3 == 0) {
      const std::vector<int64_t> gone = some_keys(60);
      lightcc_embedding_erase(table(), gone.data(), int64_t(gone.size()));
    }
    if (random_() % 40 == 0) lightcc_embedding_clear(table());
  }
  uint64_t random() { return random_(); }
  Ranks ranks;

 private:
  std::mt19937_64 random_;
};

class EmbeddingUndoRules : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rules, EmbeddingUndoRules,
                         testing::Values(LIGHTCC_EMBEDDING_SGD, LIGHTCC_EMBEDDING_SPARSE_ADAM,
                                         LIGHTCC_EMBEDDING_GROUP_ADAGRAD, LIGHTCC_EMBEDDING_GROUP_ADAM));

TEST_P(EmbeddingUndoRules, GoesBackBitForBit) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    RandomTraining training(GetParam(), seed, 1 + seed % 3);
    if (seed % 2) training.count_in_a_filter();
    for (uint64_t i = training.random() % 10; i > 0; --i) training.step();
    ASSERT_EQ(lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT), 0);
    for (int turn = 0; turn < 6; ++turn) {
      const Moment committed(*training.table());
      for (int back = 0; back < 2; ++back) {  // the log goes on after it
        for (uint64_t i = training.random() % 12; i > 0; --i) training.step();
        ASSERT_EQ(lightcc_embedding_go_back(training.table()), 0) << lightcc_embedding_error();
        ASSERT_TRUE(Moment(*training.table()) == committed);
      }
      for (uint64_t i = training.random() % 6; i > 0; --i) training.step();
      ASSERT_EQ(lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT), 0);
    }
  }
}

// What was undone is not seen in what follows.
TEST(EmbeddingUndo, TrainingGoesOnAsIfNothingHadBeen) {
  RandomTraining once(LIGHTCC_EMBEDDING_SPARSE_ADAM, 3), twice(LIGHTCC_EMBEDDING_SPARSE_ADAM, 3);
  const auto train = [](RandomTraining& training, int64_t first, double lr) {
    const std::vector<int64_t> keys{first, first + 1, first + 2};
    Call* call = training.ranks.update(0, keys, std::vector<double>(9, 0.25), 0, {lr, 0.9, 0.99, 1e-8});
    ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
    release({call});
  };
  for (int64_t i = 0; i < 5; ++i) train(once, i, 0.1), train(twice, i, 0.1);
  lightcc_embedding_begin_log(twice.table(), LIGHTCC_EMBEDDING_OF_COMMIT);
  for (int64_t i = 0; i < 5; ++i) train(twice, 3 * i, 0.7);
  lightcc_embedding_go_back(twice.table());
  for (int64_t i = 0; i < 9; ++i) train(once, 9 - i, 0.05), train(twice, 9 - i, 0.05);
  EXPECT_TRUE(Moment(*once.table()) == Moment(*twice.table()));
}

// All rows of the moment have gone, and those that were born since go first.
TEST(EmbeddingUndo, RowsComeBackWhereNoneIsLeft) {
  RandomTraining training(LIGHTCC_EMBEDDING_ADAGRAD, 4);
  const auto train = [&](const std::vector<int64_t>& keys) {
    Call* call = training.ranks.update(0, keys, std::vector<double>(3 * keys.size(), 1), 0, {0.1});
    ASSERT_EQ(lightcc_embedding_finish(call, 0), 0) << lightcc_embedding_error();
    release({call});
  };
  const std::vector<int64_t> before{1, 2, 3};
  train(before);
  lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT);
  const Moment committed(*training.table());
  train({4, 5});
  ASSERT_EQ(lightcc_embedding_erase(training.table(), before.data(), 3), 0);
  ASSERT_EQ(lightcc_embedding_go_back(training.table()), 0) << lightcc_embedding_error();
  EXPECT_TRUE(Moment(*training.table()) == committed);
}

// As a checkpoint is written: slices of the table while it trains, without what the log has, and then the log.
TEST_P(EmbeddingUndoRules, TheTableIsWrittenAsItWas) {
  for (unsigned seed = 100; seed < 115; ++seed) {
    SCOPED_TRACE(seed);
    RandomTraining training(GetParam(), seed, 1 + seed % 3);
    for (int i = 0; i < 12; ++i) training.step();
    const Rows then = rows_of(*training.table());
    lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_CHECKPOINT);
    lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT);
    std::map<int64_t, std::vector<double>> written;
    std::vector<int64_t> keys(16);
    std::vector<double> weights(16 * 3);
    std::vector<std::vector<double>> slots(3, std::vector<double>(16 * 3));
    lightcc_embedding_rows rows{sizeof rows, 0, 16, 0, 0, 0, keys.data(), nullptr, nullptr, nullptr, weights.data(),
                                {slots[0].data(), slots[1].data(), slots[2].data(), nullptr}};
    const auto take = [&](bool of_table) {
      for (size_t i = 0; i < size_t(rows.count); ++i) {
        uint8_t logged = 0;
        lightcc_embedding_logged(training.table(), LIGHTCC_EMBEDDING_OF_CHECKPOINT, &keys[i], 1, &logged);
        if (!of_table || !logged) written[keys[i]] = {&weights[3 * i], &weights[3 * i] + 3};
      }
    };
    while (lightcc_embedding_export(training.table(), &rows) == 0 && rows.count) {
      take(true);
      training.step();
      if (training.random() % 4 == 0) lightcc_embedding_go_back(training.table());
    }
    rows.cursor = 0;
    while (lightcc_embedding_export_log(training.table(), LIGHTCC_EMBEDDING_OF_CHECKPOINT, &rows) == 0 && rows.count)
      take(false);
    ASSERT_EQ(written.size(), then.size());
    for (auto& [key, record] : then)
      ASSERT_EQ(std::memcmp(record.data() + sizeof(RowHeader), written.at(key).data(), 3 * sizeof(double)), 0) << key;
  }
}

// As checkpoints are written, too, one after the other: all candidates, and then those that have changed.
class WrittenCandidates {
 public:
  explicit WrittenCandidates(RandomTraining& training) : training_(training), table_(training.table()) {}

  void begin(bool in_a_filter) {
    int64_t count = 0;
    lightcc_embedding_gone(table_, LIGHTCC_EMBEDDING_OF_CHECKPOINTS, 0, nullptr, &count);
    readers_ = count >= 0 && !back_ ? LIGHTCC_EMBEDDING_OF_CHECKPOINTS : 0;
    if (!readers_) counts_.clear();
    std::vector<int64_t> gone(readers_ ? size_t(count) : 0);
    lightcc_embedding_gone(table_, LIGHTCC_EMBEDDING_OF_CHECKPOINTS, int64_t(gone.size()), gone.data(), &count);
    if (!in_a_filter) {
      for (int64_t key : gone) counts_.erase(key);
      for (auto& [key, row] : rows_of(*table_)) counts_.erase(key);
    }
    back_ = false;
    lightcc_embedding_begin_log(table_, LIGHTCC_EMBEDDING_OF_CHECKPOINT);
    lightcc_embedding_begin_log(table_, LIGHTCC_EMBEDDING_OF_COMMIT);
    lightcc_embedding_forget_gone(table_, LIGHTCC_EMBEDDING_OF_CHECKPOINTS);
  }

  void read_while_it_trains(bool goes_back) {
    int64_t count = 0;
    for (int part = 0; part < LIGHTCC_EMBEDDING_CANDIDATE_PARTS; ++part) {
      lightcc_embedding_export_candidates(table_, part, readers_ | LIGHTCC_EMBEDDING_TAKE, 1000, keys_.data(),
                                          seen_.data(), &count);
      for (size_t i = 0; i < size_t(count); ++i) counts_[keys_[i]] = seen_[i];
      if (training_.random() % 4 == 0) training_.step();
      if (goes_back && training_.random() % 16 == 0) back_ = !lightcc_embedding_go_back(table_);
    }
    for (int64_t first = 0, left = 1; left; ++first) {
      ASSERT_EQ(lightcc_embedding_export_candidate_log(table_, LIGHTCC_EMBEDDING_OF_CHECKPOINT, first, 1, keys_.data(),
                                                       seen_.data(), &left), 0);
      if (!left) break;
      counts_.erase(keys_[0]);
      if (seen_[0]) counts_[keys_[0]] = seen_[0];
    }
  }

  const Counts& counts() const { return counts_; }
  bool is_delta() const { return readers_; }

 private:
  RandomTraining& training_;
  Table* table_;
  Counts counts_;
  std::vector<int64_t> keys_ = std::vector<int64_t>(1000);
  std::vector<uint32_t> seen_ = std::vector<uint32_t>(1000);
  int readers_ = 0;
  bool back_ = false;  // the next one has all
};

TEST(EmbeddingUndo, CandidatesAreWrittenAsTheyWere) {
  int deltas = 0;
  for (unsigned seed = 0; seed < 30; ++seed) {
    SCOPED_TRACE(seed);
    RandomTraining training(LIGHTCC_EMBEDDING_SGD, seed, 3);
    if (seed % 2) training.count_in_a_filter();
    WrittenCandidates written(training);
    for (int checkpoint = 0; checkpoint < 5; ++checkpoint) {
      for (int i = 0; i < 6; ++i) training.step();
      const Counts then = candidates_of(*training.table());
      written.begin(seed % 2);
      deltas += written.is_delta();
      written.read_while_it_trains(seed % 3 == 0);
      ASSERT_EQ(written.counts(), then);
    }
  }
  EXPECT_GT(deltas, 40);
}

// And no others: what has not changed is read once.
TEST(EmbeddingUndo, CandidatesThatHaveNotChangedAreReadOnce) {
  for (bool in_a_filter : {false, true}) {
    Ranks one(1, Spec{.dim = 1});
    Table* table = one.tables[0];
    ASSERT_EQ(lightcc_embedding_set_admission(table, 3, 0), 0);
    if (in_a_filter) { ASSERT_EQ(lightcc_embedding_set_filter(table, kFilterBytes, 4), 0); }
    const auto train = [&](int64_t first, int64_t last) {
      std::vector<int64_t> keys;
      for (int64_t key = first; key < last; ++key) keys.push_back(key);
      Call* call = one.update(0, keys, std::vector<double>(keys.size(), 1), 0);
      ASSERT_EQ(lightcc_embedding_finish(call, 0), 0);
      release({call});
    };
    const auto read = [&](int flags) {
      int64_t all = 0, count = 0;
      std::vector<int64_t> keys(10000);
      std::vector<uint32_t> seen(10000);
      for (int part = 0; part < LIGHTCC_EMBEDDING_CANDIDATE_PARTS; ++part) {
        lightcc_embedding_export_candidates(table, part, flags, 10000, keys.data(), seen.data(), &count);
        all += count;
      }
      return all;
    };
    const int take = LIGHTCC_EMBEDDING_OF_CHECKPOINTS | LIGHTCC_EMBEDDING_TAKE;
    train(0, 10000);
    lightcc_embedding_begin_log(table, LIGHTCC_EMBEDDING_OF_CHECKPOINT);
    EXPECT_EQ(read(take), read(0));
    EXPECT_EQ(read(take), 0);
    EXPECT_EQ(read(LIGHTCC_EMBEDDING_OF_DELTAS), read(0));
    train(5000, 5100);
    EXPECT_EQ(read(take), 0) << "the log has them";
    lightcc_embedding_begin_log(table, LIGHTCC_EMBEDDING_OF_CHECKPOINT);
    EXPECT_GE(read(LIGHTCC_EMBEDDING_OF_CHECKPOINTS), 100);
    EXPECT_LE(read(take), 400);
    ASSERT_EQ(lightcc_embedding_forget_changes(table), 0);
    EXPECT_EQ(read(LIGHTCC_EMBEDDING_OF_DELTAS), 0);
  }
}

TEST(EmbeddingUndo, CostsTheRowsThatChangeOnce) {
  RandomTraining training(LIGHTCC_EMBEDDING_SGD, 1);
  std::vector<int64_t> all;
  for (int64_t i = 0; i < 20000; ++i) all.push_back(i);
  const auto train = [&](const std::vector<int64_t>& keys) {
    Call* call = training.ranks.update(0, keys, std::vector<double>(keys.size() * 3, 1), 0);
    ASSERT_EQ(lightcc_embedding_finish(call, 0), 0);
    release({call});
  };
  train(all);
  lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT);
  for (int i = 0; i < 10; ++i) train({1, 2, 3, 50000, 50001});
  int64_t keys = 0, records = 0, bytes = 0;
  lightcc_embedding_log_stats(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT, &keys, &records, &bytes);
  EXPECT_EQ(keys, 5);
  EXPECT_EQ(records, 3);
  EXPECT_LT(bytes, 4096 * 64);
}

TEST(EmbeddingUndo, GoingBackNeedsALog) {
  Ranks one(1);
  EXPECT_EQ(lightcc_embedding_go_back(one.tables[0]), LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(lightcc_embedding_begin_log(one.tables[0], 2), LIGHTCC_INVALID_ARGUMENT);
  int64_t count = 0;
  for (auto [log, first] : {std::pair(2, 0), {0, -1}})
    EXPECT_EQ(lightcc_embedding_export_candidate_log(one.tables[0], log, first, 0, nullptr, nullptr, &count),
              LIGHTCC_INVALID_ARGUMENT);
}

TEST(EmbeddingGroup, IsFreedBeforeItsTablesAndCallsInAnyOrder) {
  for (int order = 0; order < 3; ++order) {
    lightcc_embedding_group* group = nullptr;
    ASSERT_EQ(lightcc_embedding_open(0, 0, 1, &group), 0);
    Table* table = make_table(group, Spec{});
    const int64_t key = 7;
    lightcc_embedding_wanted wanted{sizeof wanted, 0, table, &key, nullptr, 1};
    Call* call = nullptr;
    ASSERT_EQ(lightcc_embedding_lookup(group, &wanted, 1, LIGHTCC_EMBEDDING_TRAINING, &call), 0);
    if (order == 2) lightcc_embedding_release(call);
    EXPECT_EQ(lightcc_embedding_close(group), 0);
    if (order == 0) lightcc_embedding_release(call);
    EXPECT_EQ(lightcc_embedding_free(table), 0);
    if (order == 1) lightcc_embedding_release(call);
  }
}

TEST(EmbeddingAdopt, RowsLogsAndStepsComeAlong) {
  RandomTraining training(LIGHTCC_EMBEDDING_SPARSE_ADAM, 9, 2);
  for (int i = 0; i < 9; ++i) training.step();
  lightcc_embedding_begin_log(training.table(), LIGHTCC_EMBEDDING_OF_COMMIT);
  const Moment committed(*training.table());
  training.step();
  Ranks next(1, Spec{.dim = 3, .rule = LIGHTCC_EMBEDDING_SPARSE_ADAM, .initial = 0.1});
  ASSERT_EQ(lightcc_embedding_adopt(next.tables[0], training.table()), 0) << lightcc_embedding_error();
  lightcc_embedding_go_back(next.tables[0]);
  EXPECT_TRUE(Moment(*next.tables[0]) == committed);
  EXPECT_EQ(training.table()->shard->index().size(), 0u);
  Ranks other(1, Spec{.name = "other", .dim = 3});
  EXPECT_EQ(lightcc_embedding_adopt(other.tables[0], next.tables[0]), LIGHTCC_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace lightcc::embedding::test
