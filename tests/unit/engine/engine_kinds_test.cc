// What each kind of collective does, on one to five engines.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "labels.h"
#include "unit/ranks.h"

LABEL(on_hosts);

namespace lightcc {
namespace {

using namespace test;

class Kinds : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Kinds, testing::Range(1, 6), testing::PrintToStringParamName());

TEST_P(Kinds, AllreduceWithEveryOperation) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    const struct { ReduceOp op; float expected; } rows[] = {
        {ReduceOp::sum, float(n * (n + 1)) / 2}, {ReduceOp::average, float(n + 1) / 2}, {ReduceOp::min, 1.0f},
        {ReduceOp::max, float(n)},               {ReduceOp::product, std::tgamma(float(n + 1))}};
    for (int64_t count : {1, 1000, 300'000})
      for (auto& row : rows) {
        std::vector<float> in(size_t(count), float(rank + 1)), out(in.size());
        auto one = request(engine, Kind::allreduce, "", {{DType::float32, {count}, in.data(), out.data()}});
        one->what.op = row.op;
        done(engine, one);
        EXPECT_NEAR(out.front(), row.expected, 1e-4) << name_of(row.op) << ", " << count;
        EXPECT_EQ(out.back(), out.front());
        EXPECT_EQ(in.front(), float(rank + 1)) << "the input was written";
      }
  });
}

TEST_P(Kinds, FactorsAndIntegerAverages) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    std::vector<double> scaled(50, rank + 1.0);
    auto one = request(engine, Kind::allreduce, "scaled", {in_place(scaled)});
    one->what.pre = 0.5, one->what.post = 4;
    done(engine, one);
    EXPECT_EQ(scaled[49], n * (n + 1.0));
    for (int64_t value : {49, -7, 1'000'003}) {
      std::vector<int64_t> average(3, value);
      one = request(engine, Kind::allreduce, "average", {in_place(average)});
      one->what.op = ReduceOp::average;
      done(engine, one);
      EXPECT_EQ(average[2], value);
    }
  });
}

TEST_P(Kinds, AllgatherOfDifferentRows) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    for (int again = 0; again < 3; ++again) {  // the rows change from time to time
      const int rows = rank * again;
      std::vector<int32_t> in(size_t(rows) * 2, rank), expected;
      for (int from = 0; from < n; ++from) expected.insert(expected.end(), size_t(from * again) * 2, from);
      auto one = done(engine, request(engine, Kind::allgather, "rows", {input_of(in, {rows, 2})}));
      EXPECT_EQ(one->results[0].shape, (Shape{int64_t(expected.size() / 2), 2}));
      EXPECT_EQ(result<int32_t>(*one), expected);
    }
  });
}

TEST_P(Kinds, BroadcastFromEachRank) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    for (int root = 0; root < n; ++root)
      for (int64_t count : {0, 1, 70'000}) {
        std::vector<int64_t> in(size_t(count), rank), out(size_t(count), -1);
        auto one = request(engine, Kind::broadcast, "", {{DType::int64, {count}, in.data(), out.data()}});
        one->what.root = root;
        done(engine, one);
        EXPECT_EQ(out, std::vector<int64_t>(size_t(count), root));
      }
  });
}

TEST_P(Kinds, AlltoallEqualAndBySplits) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    std::vector<int32_t> in(size_t(n) * 2), expected;
    for (int i = 0; i < 2 * n; ++i) in[size_t(i)] = rank * 100 + i / 2;
    for (int from = 0; from < n; ++from) expected.insert(expected.end(), 2, from * 100 + rank);
    auto one = done(engine, request(engine, Kind::alltoall, "", {input_of(in, {2 * n})}));
    EXPECT_EQ(result<int32_t>(*one), expected);
    // To rank r go r rows; the last row goes nowhere.
    Shape splits;
    in.clear(), expected.clear();
    for (int to = 0; to < n; ++to) splits.push_back(to), in.insert(in.end(), size_t(to), rank * 100 + to);
    in.push_back(-1);
    for (int from = 0; from < n; ++from) expected.insert(expected.end(), size_t(rank), from * 100 + rank);
    auto two = request(engine, Kind::alltoall, "", {input_of(in, {int64_t(in.size())})});
    two->what.splits = splits;
    done(engine, two);
    EXPECT_EQ(result<int32_t>(*two), expected);
    EXPECT_EQ(two->results[0].rows_from, std::vector<int32_t>(size_t(n), rank));
  });
}

TEST_P(Kinds, ReducescatterGivesTheFirstRanksTheRowsLeftOver) {
  const int n = GetParam();
  Ranks ranks(n);
  const std::pair<ReduceOp, float> reductions[] = {  // and what they make of the ranks' numbers
      {ReduceOp::average, float(n - 1) / 2}, {ReduceOp::min, 0}, {ReduceOp::max, float(n - 1)}};
  ranks.each([&](Engine& engine, int rank) {
    for (int64_t rows : {int64_t(0), int64_t(2), int64_t(2 * n + 1), int64_t(40'001)}) {
      std::vector<float> in(size_t(rows) * 3);
      for (size_t i = 0; i < in.size(); ++i) in[i] = float(i / 3) + float(rank);
      for (const auto& [op, shift] : reductions) {
        auto one = request(engine, Kind::reducescatter, "", {input_of(in, {rows, 3})});
        one->what.op = op;
        done(engine, one);
        const int64_t begin = rank * (rows / n) + std::min<int64_t>(rank, rows % n);
        const int64_t mine = rows / n + (rank < rows % n);
        EXPECT_EQ(one->results[0].shape, (Shape{mine, 3}));
        const auto out = result<float>(*one);
        for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], float(begin + int64_t(i) / 3) + shift, 0.01) << i;
      }
    }
  });
}

TEST_P(Kinds, BarrierHoldsUntilTheLastHasCome) {
  Ranks ranks(GetParam());
  std::atomic<int> come{0};
  ranks.each([&](Engine& engine, int rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5 * rank));
    ++come;
    done(engine, request(engine, Kind::barrier, "", {}));
    EXPECT_EQ(come, ranks.size());
  });
}

}  // namespace
}  // namespace lightcc
