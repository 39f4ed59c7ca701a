// join(): a rank without more data stands by while the others go on, with every kind of collective.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <numeric>

#include "unit/helpers.h"
#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(on_hosts, "Join.*:Joined.*:Sizes/Joins.*:*Absent.GroupsOf*:*Absent.DisagreementsOf*-*ADeath*");
LABEL(as_placed, "*ADeath*:*Absent.*-*Absent.GroupsOf*:*Absent.DisagreementsOf*");

namespace lightcc {
namespace {

using namespace test;
using std::chrono::milliseconds;

RequestPtr joining(Engine& engine) {
  auto one = request(engine, Kind::join, "", {});
  one->automatic = false, one->key = "join.";
  return one;
}
int join(Engine& engine) { return done(engine, joining(engine))->last_joined; }

class Joins : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Joins, testing::Range(1, 5), testing::PrintToStringParamName());

TEST_P(Joins, UnevenWorkGoesOnWithoutThoseWhoAreDone) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (int step = 0; step <= 5 * rank; ++step) {
        std::vector<std::vector<float>> tensors;
        std::vector<RequestPtr> requests;
        for (size_t count : {1, 10, 1000, 200'000}) tensors.emplace_back(count, float(rank + 1));
        for (size_t i = 0; i < tensors.size(); ++i) {
          requests.push_back(request(engine, Kind::allreduce, i == 1 ? "" : std::to_string(i), {in_place(tensors[i])}));
          if (i == 2) requests[i]->what.op = ReduceOp::average;
          engine.submit(requests[i], false);
        }
        float sum = 0;
        for (int other = 0; other < n; ++other) sum += 5 * other >= step ? float(other + 1) : 0;
        for (size_t i = 0; i < tensors.size(); ++i) {
          ASSERT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
          ASSERT_FLOAT_EQ(tensors[i].back(), i == 2 ? sum / float(n) : sum) << "step " << step << ", tensor " << i;
          ASSERT_EQ(tensors[i].front(), tensors[i].back());
        }
      }
      EXPECT_EQ(join(engine), n - 1);
    }
  });
}

// A rank that has joined runs one batch at a time where the others run two, of all sizes and so by several backends.
TEST(Joined, StandsByWhileTheOthersRunTwoBatchesAtATime) {
  Ranks ranks(std::vector<int>{2, 1, 1});
  ranks.each([](Engine& engine, int rank) {
    for (int step = 0; step < 2 + 2 * (rank == 1); ++step) {
      std::vector<std::vector<float>> tensors;
      std::vector<RequestPtr> requests;
      for (size_t i = 0; i < 16; ++i) {
        tensors.emplace_back(i % 4 == 3 ? 100 : kWatched ? 300'000 : 1'200'000, float(rank + 1));
        requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(tensors[i])}));
        if (i == 9) requests[i]->what.op = ReduceOp::adasum;
        engine.submit(requests[i], false);
      }
      const float sum = step < 2 ? 1 + 2 + 3 + 4 : 2;
      for (size_t i = 0; i < tensors.size(); ++i) {
        ASSERT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
        ASSERT_EQ(tensors[i].front(), tensors[i].back());
        if (i != 9) {
          ASSERT_EQ(tensors[i].front(), sum) << "step " << step << ", tensor " << i;
        }
      }
    }
    join(engine);
  });
}

TEST_P(Joins, AllAtOnceAgainAndAgain) {
  const int n = GetParam();
  Ranks ranks(n);
  std::vector<std::vector<int>> last(size_t(n), std::vector<int>(20));
  ranks.each([&](Engine& engine, int rank) {
    for (int& who : last[size_t(rank)]) who = join(engine);
  });
  for (auto& each : last) EXPECT_EQ(each, last[0]) << "the ranks disagree on who was last";
  for (int who : last[0]) EXPECT_TRUE(who >= 0 && who < n) << who;
}

TEST_P(Joins, NumbersOfUnnamedRequestsBeginAnew) {
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([n](Engine& engine, int rank) {
    const int set = add_group(engine, {n - 1});
    std::vector<float> x(10, 1);
    for (int i = 0; i < 3 * rank; ++i) done(engine, request(engine, Kind::allreduce, "", {in_place(x)}));
    if (rank == n - 1) done(engine, request(engine, Kind::barrier, "", {}, set));
    join(engine);
    for (int i = 0; i < 3; ++i) {
      std::vector<float> y(10, 1);
      auto one = request(engine, Kind::allreduce, "", {in_place(y)});
      EXPECT_EQ(negotiated(engine, one), Code::ok);
      EXPECT_EQ(one->name(), "noname." + std::to_string(i));
      EXPECT_EQ(y[9], float(n));
    }
    if (rank == n - 1) {
      EXPECT_EQ(done(engine, request(engine, Kind::barrier, "", {}, set))->name(), "noname.0");
    }
  });
}

// ---- each kind, while one rank of three stands by

constexpr int kSize = 3;

class Absent : public testing::TestWithParam<int> {};  // which rank: the coordinator, or another
INSTANTIATE_TEST_SUITE_P(Ranks, Absent, testing::Range(0, kSize), testing::PrintToStringParamName());

// What the others do; the work is repeated, since the second time it is known by number.
void without(int absent, const std::function<void(Engine&, int rank)>& work) {
  Ranks ranks(kSize);
  ranks.each([&](Engine& engine, int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int again = 0; again < 3 && rank != absent; ++again) work(engine, rank);
      const int last = join(engine);
      EXPECT_NE(last, absent);
      std::vector<float> x(10, 1);
      done(engine, request(engine, Kind::allreduce, "after", {in_place(x)}));
      EXPECT_EQ(x[9], kSize);
    }
  });
}

template <class T>
void check_reductions(Engine& engine, int absent, int rank) {
  for (int64_t count : {1, 300, 100'000})
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::average, ReduceOp::min, ReduceOp::max, ReduceOp::product,
                        ReduceOp::adasum})
      for (double pre : {1.0, 2.0}) {
        if (op == ReduceOp::adasum && std::is_integral_v<T>) continue;
        std::vector<double> in;
        for (int other = 0; other < kSize; ++other)
          if (other != absent) in.push_back(pre * (3 + other));
        const double sum = in[0] + in[1];
        const double expected = op == ReduceOp::sum       ? sum
                                : op == ReduceOp::average ? sum / kSize
                                : op == ReduceOp::min     ? std::min(in[0], in[1])
                                : op == ReduceOp::max     ? std::max(in[0], in[1])
                                : op == ReduceOp::adasum  ? sum / 2  // of two parallel vectors and one of zeros
                                                          : in[0] * in[1];
        std::vector<T> x(size_t(count), T(3 + rank));
        auto one = request(engine, Kind::allreduce, "x", {in_place(x)});
        one->what.op = op, one->what.pre = pre;
        done(engine, one);
        ASSERT_NEAR(double(x.back()), std::is_integral_v<T> ? std::trunc(expected) : expected, 1e-5)
            << name_of(op) << " of " << count << " " << name_of(dtype_of<T>()) << ", pre " << pre;
        ASSERT_EQ(x.front(), x.back());
      }
}

TEST_P(Absent, ReductionsAreThoseOfTheOthers) {
  without(GetParam(), [](Engine& engine, int rank) {
    check_reductions<float>(engine, GetParam(), rank);
    check_reductions<double>(engine, GetParam(), rank);
    check_reductions<int32_t>(engine, GetParam(), rank);
    check_reductions<uint8_t>(engine, GetParam(), rank);
  });
}

TEST_P(Absent, GroupsOfSeveralTypes) {
  without(GetParam(), [](Engine& engine, int) {
    std::vector<float> a(1000, 2), b(3, 5);
    std::vector<int64_t> c(70, -1);
    std::vector<float> none;
    done(engine, request(engine, Kind::allreduce, "x", {in_place(a), in_place(c), in_place(none), in_place(b)}));
    EXPECT_EQ(a, std::vector<float>(1000, 4));
    EXPECT_EQ(b, std::vector<float>(3, 10));
    EXPECT_EQ(c, std::vector<int64_t>(70, -2));
  });
}

TEST_P(Absent, FusedInSharedMemoryNothingIsCopied) {
  without(GetParam(), [](Engine& engine, int) {
    constexpr int64_t kCount = 1 << 18;
    auto* memory = reinterpret_cast<float*>(engine.arena()->allocate(2 * kCount * sizeof(float)));
    std::fill_n(memory, 2 * kCount, 1.0f);
    auto one = request(engine, Kind::allreduce, "1", {in_place(memory, kCount)});
    auto two = request(engine, Kind::allreduce, "2", {in_place(memory + kCount, kCount)});
    engine.submit(one, false), engine.submit(two, false);
    EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
    EXPECT_EQ(finish(engine, two), Code::ok) << two->text;
    EXPECT_EQ(std::accumulate(memory, memory + 2 * kCount, 0.0), 2.0 * 2 * kCount);
    engine.arena()->release(reinterpret_cast<std::byte*>(memory));
  });
}

TEST_P(Absent, AllgatherHasNoRowsOfIt) {
  without(GetParam(), [](Engine& engine, int rank) {
    std::vector<int32_t> in(size_t(rank + 1) * 2, rank), expected;
    for (int from = 0; from < kSize; ++from)
      if (from != GetParam()) expected.insert(expected.end(), size_t(from + 1) * 2, from);
    const std::vector<Tensor> both{input_of(in, {rank + 1, 2}), input_of(in, {2 * (rank + 1)})};
    auto one = done(engine, request(engine, Kind::allgather, "x", both));
    EXPECT_EQ(result<int32_t>(*one, 0), expected);
    EXPECT_EQ(result<int32_t>(*one, 1), expected);
  });
}

TEST_P(Absent, AlltoallSendsItNothing) {
  without(GetParam(), [](Engine& engine, int rank) {
    std::vector<int32_t> in, expected, from_each;
    for (int to = 0; to < kSize; ++to) in.insert(in.end(), 2, rank * 100 + to);
    for (int from = 0; from < kSize; ++from) {
      from_each.push_back(from == GetParam() ? 0 : 2);
      expected.insert(expected.end(), size_t(from_each.back()), from * 100 + rank);
    }
    auto one = done(engine, request(engine, Kind::alltoall, "x", {input_of(in, {2 * kSize})}));
    EXPECT_EQ(result<int32_t>(*one), expected);
    EXPECT_EQ(one->results[0].rows_from, from_each);
  });
}

TEST_P(Absent, ReducescatterGivesTheOthersTheirParts) {
  without(GetParam(), [](Engine& engine, int rank) {
    for (int64_t rows : {2, 7, 30'000}) {
      std::vector<double> in(size_t(rows) * 2);
      for (size_t i = 0; i < in.size(); ++i) in[i] = double(i / 2) * (rank + 1);
      double factor = 0;
      for (int other = 0; other < kSize; ++other) factor += other == GetParam() ? 0 : other + 1;
      auto one = done(engine, request(engine, Kind::reducescatter, "x", {input_of(in, {rows, 2})}));
      const int64_t begin = rank * (rows / kSize) + std::min<int64_t>(rank, rows % kSize);
      const auto out = result<double>(*one);
      EXPECT_EQ(out.size(), size_t(rows / kSize + (rank < rows % kSize)) * 2);
      for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], factor * double(begin + int64_t(i) / 2)) << i;
    }
  });
}

// The ones that it puts into a product stay ones.
TEST_P(Absent, FactorsOfAReducescatterAreNotAppliedToIt) {
  without(GetParam(), [](Engine& engine, int rank) {
    double product = 1;
    for (int other = 0; other < kSize; ++other) product *= other == GetParam() ? 1 : 2 * (3 + other);
    const std::vector<double> in(kSize, 3 + rank);
    auto one = request(engine, Kind::reducescatter, "x", {input_of(in, {kSize})});
    one->what.op = ReduceOp::product, one->what.pre = 2, one->what.post = 5;
    EXPECT_EQ(result<double>(*done(engine, one)), std::vector<double>{5 * product});
  });
}

TEST_P(Absent, BroadcastFromItFailsAndFromOthersWorks) {
  without(GetParam(), [](Engine& engine, int rank) {
    for (int root = 0; root < kSize; ++root)
      for (int64_t count : {1, 100'000}) {
        std::vector<int32_t> x(size_t(count), rank);
        auto one = request(engine, Kind::broadcast, "x", {in_place(x)});
        one->what.root = root;
        if (root == GetParam()) {
          EXPECT_EQ(run(engine, one), Code::mismatch);
          EXPECT_TRUE(contains(one->text, "broadcast of tensor 'x': root rank " + std::to_string(root) + " has joined"))
              << one->text;
        } else {
          done(engine, one);
          EXPECT_EQ(x, std::vector<int32_t>(size_t(count), root));
        }
      }
  });
}

TEST_P(Absent, BarrierCountsItAsPresent) {
  without(GetParam(), [](Engine& engine, int) { done(engine, request(engine, Kind::barrier, "", {})); });
}

TEST_P(Absent, ProcessSetsCannotChange) {
  const std::string who = "rank " + std::to_string(GetParam());
  without(GetParam(), [&](Engine& engine, int) {
    for (Kind kind : {Kind::add_group, Kind::remove_group}) {
      auto one = request(engine, kind, "", {{DType::uint8, {1}, nullptr, nullptr}});
      EXPECT_EQ(run(engine, one), Code::mismatch);
      EXPECT_TRUE(contains(one->text, "all ranks of the job must call it, but " + who + " has joined")) << one->text;
    }
    EXPECT_EQ(engine.group_ids(), std::vector{0});
  });
}

TEST_P(Absent, DisagreementsOfTheOthersAreTold) {
  without(GetParam(), [](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    auto one = request(engine, Kind::allreduce, "x", {in_place(x)});
    const int odd = GetParam() == 2 ? 1 : 2;
    if (rank == odd) one->what.tensors[0].shape = {5, 2};
    EXPECT_EQ(run(engine, one), Code::mismatch);
    EXPECT_TRUE(contains(one->text, "rank " + std::to_string(odd) + " has [5, 2]")) << one->text;
    done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
    EXPECT_EQ(x[9], 2);
  });
}

TEST_P(Absent, ProcessSetsOfWhichItIsAMemberGoOn) {
  Ranks ranks(kSize);
  ranks.each([](Engine& engine, int rank) {
    const std::vector<std::vector<int>> sets{{0, 1}, {1, 2}, {0, 2}, {GetParam()}};
    for (auto& set : sets) add_group(engine, set);
    for (int again = 0; again < 3 && rank != GetParam(); ++again)
      for (int group = 1; group <= 3; ++group) {
        const auto& set = sets[size_t(group - 1)];
        if (std::find(set.begin(), set.end(), rank) == set.end()) continue;
        float sum = 0;
        for (int other : set) sum += other == GetParam() ? 0 : float(other + 1);
        for (const char* name : {"x", ""}) {
          std::vector<float> x(5000, float(rank + 1));
          done(engine, request(engine, Kind::allreduce, name, {in_place(x)}, group));
          EXPECT_EQ(x.back(), sum) << "process set " << group;
        }
      }
    join(engine);
    for (int group = 1; group <= 3; ++group) {
      const auto& set = sets[size_t(group - 1)];
      if (std::find(set.begin(), set.end(), rank) == set.end()) continue;
      std::vector<float> x(10, 1);
      done(engine, request(engine, Kind::allreduce, "", {in_place(x)}, group));
      EXPECT_EQ(x[9], 2);
    }
  });
}

// ---- before, during and after

TEST_P(Absent, WhatItSubmittedBeforeTakesPart) {
  Ranks ranks(kSize);
  ranks.each([](Engine& engine, int rank) {
    const int pair = add_group(engine, {0, 1, 2});
    for (int epoch = 0; epoch < 3; ++epoch) {
      std::vector<std::vector<float>> tensors(6, std::vector<float>(3000, 1));
      std::vector<RequestPtr> requests;
      if (rank != GetParam()) std::this_thread::sleep_for(milliseconds(20));  // it is in join() before they come
      for (size_t i = 0; i < tensors.size(); ++i) {
        const int group = i < 3 ? 0 : pair;
        requests.push_back(request(engine, Kind::allreduce, std::to_string(i % 3), {in_place(tensors[i])}, group));
        engine.submit(requests.back(), false);
      }
      join(engine);
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_TRUE(requests[i]->finished) << "join() returned before it";
        EXPECT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
        EXPECT_EQ(tensors[i].back(), kSize);
      }
    }
  });
}

TEST(Join, WhatOnlyOneRankHadStillRuns) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(10, float(rank + 1));
    auto one = request(engine, Kind::allreduce, "of rank " + std::to_string(rank), {in_place(x)});
    engine.submit(one, false);
    join(engine);
    EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
    EXPECT_EQ(x[9], float(rank + 1));
  });
}

// A small cache gives numbers away while cached requests by them are on the way.
TEST(Join, WithHardlyAnyCache) {
  Config config;
  config.cache_capacity = 2;
  Ranks ranks(3, config);
  ranks.each([](Engine& engine, int rank) {
    for (int epoch = 0; epoch < 10; ++epoch) {
      std::vector<std::vector<float>> tensors;
      std::vector<RequestPtr> requests;
      for (int step = 0; step < 3 + rank * 3; ++step) {
        tensors.assign(5, std::vector<float>(10, 1)), requests.clear();
        for (size_t i = 0; i < tensors.size(); ++i) {
          const std::string name = std::to_string(i * size_t(1 + rank) % 5);  // each rank in another order
          requests.push_back(request(engine, Kind::allreduce, name, {in_place(tensors[i])}));
          engine.submit(requests.back(), false);
        }
        if (step == 2 + rank * 3) continue;
        for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
      }
      join(engine);  // the last step is still on its way
      for (size_t i = 0; i < tensors.size(); ++i) {
        EXPECT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
        EXPECT_EQ(tensors[i][9], float(3 - rank)) << "a rank's data was lost";
      }
    }
  });
}

TEST(Join, NumbersStandForRequestsWhileARankStandsBy) {
  Ranks ranks(3);
  uint64_t announced = 0;
  ranks.each([&](Engine& engine, int rank) {
    for (int i = 0; i < 100 && rank != 1; ++i) {
      std::vector<float> x(10, 1);
      done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
    }
    if (rank == 0) announced = engine.counters().values[Counters::announced];
    join(engine);
  });
  EXPECT_LE(announced, 3u) << "at first, and once more when rank 1 had joined";
}

TEST(Join, ItsMemoryDoesNotGrow) {
  Ranks ranks(2);
  std::byte *first = nullptr, *later = nullptr;
  ranks.each([&](Engine& engine, int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int i = 0; i < 50 && rank == 1; ++i) {
        std::vector<float> x(300'000, 1);
        done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
      }
      join(engine);
      std::byte* p = engine.arena()->allocate(1 << 20);
      if (rank == 0) (epoch == 0 ? first : later) = p;
      engine.arena()->release(p);
    }
  });
  EXPECT_EQ(first, later);
}

TEST(Join, AProcessSetThatComesMeanwhileGoesOnWithoutItToo) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    const auto sum = [&] {
      std::vector<float> x(10, 1);
      done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}, 1));
      return x[9];
    };
    auto add = request(engine, Kind::add_group, "", {{DType::uint8, {0, 1, 2}, nullptr, nullptr}});
    if (rank != 0) std::this_thread::sleep_for(milliseconds(20));  // rank 0 is in join() by then
    engine.submit(add, false);
    if (rank != 0) {
      EXPECT_EQ(finish(engine, add), Code::ok) << add->text;
      EXPECT_EQ(sum(), 2);
    }
    join(engine);
    EXPECT_EQ(finish(engine, add), Code::ok) << add->text;
    EXPECT_EQ(sum(), 3);
  });
}

TEST(Join, NothingIsTakenFromARankInside) {
  Ranks ranks(2);
  std::vector<float> x(10, 1);
  auto one = joining(ranks[0]);
  ranks[0].submit(one, false);
  for (const RequestPtr& more : {request(ranks[0], Kind::allreduce, "x", {in_place(x)}), joining(ranks[0])}) {
    try {
      ranks[0].submit(more, false);
      ADD_FAILURE() << more->title() << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      EXPECT_TRUE(contains(error.what(), "rank 0 has called join()")) << error.what();
    }
  }
  EXPECT_EQ(join(ranks[1]), 1);
  EXPECT_EQ(finish(ranks[0], one), Code::ok);
  EXPECT_EQ(one->last_joined, 1);
  ranks.each([](Engine& engine, int) {
    std::vector<float> y(10, 1);
    done(engine, request(engine, Kind::allreduce, "x", {in_place(y)}));
  });
}

TEST(Join, IsOfTheWholeJob) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int) {
    const int pair = add_group(engine, {0, 1});
    auto one = joining(engine);
    one->group = pair;
    EXPECT_THROW(engine.submit(one, true), Error);
  });
}

// ---- ends

TEST(Join, ARankThatLeavesIsNamedByThoseInside) {
  for (int leaver : {0, 2}) {
    Ranks ranks(3);
    ranks.each([&](Engine& engine, int rank) {
      add_group(engine, {0, 1});
      if (rank == leaver) return std::this_thread::sleep_for(milliseconds(30)), engine.shutdown();
      auto one = joining(engine);
      const uint64_t begin = now_ns();
      EXPECT_EQ(outcome(engine, one), Code::shut_down);
      EXPECT_LT(now_ns() - begin, 5 * kSecondNs);
      EXPECT_TRUE(contains(one->text, "join(): rank " + std::to_string(leaver) + " (a thread) has left")) << one->text;
    });
  }
}

TEST(Join, ARankThatLeavesAfterItHarmsNobody) {
  for (int turn = 0; turn < 20; ++turn) {
    Ranks ranks(3);
    ranks.each([&](Engine& engine, int rank) {
      const int pair = add_group(engine, {0, 1});
      join(engine);
      if (rank == 2) return engine.shutdown();
      std::vector<float> x(10, 1);
      done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}, pair));
    });
  }
}

TEST(Join, ADeathIsNamedByThoseInside) {
  for (int dead : {0, 2}) {
    Ranks ranks(3);
    ranks.each([&](Engine& engine, int rank) {
      if (rank == dead) return;
      if (rank == 1) {
        std::this_thread::sleep_for(milliseconds(30));
        engine.peer_ended(dead);
      }
      auto one = joining(engine);
      const uint64_t begin = now_ns();
      EXPECT_EQ(outcome(engine, one), Code::peer_lost);
      EXPECT_LT(now_ns() - begin, kPatienceNs / 2);
      EXPECT_TRUE(contains(one->text, "rank " + std::to_string(dead) + " (a thread) died")) << one->text;
    });
  }
}

TEST(Join, AbortAndShutdownEndIt) {
  for (bool abort : {true, false}) {
    Ranks ranks(2);
    auto one = joining(ranks[0]);
    std::thread waiter([&] { EXPECT_EQ(outcome(ranks[0], one), Code::shut_down); });
    std::this_thread::sleep_for(milliseconds(30));
    if (abort)
      ranks[1].abort("interrupted on rank 1");
    else
      ranks[0].shutdown();
    waiter.join();
    EXPECT_TRUE(contains(one->text, abort ? "interrupted on rank 1" : "has been shut down on this rank")) << one->text;
  }
}

TEST(Join, AStallNamesWhoIsMissingAndWhoHasJoined) {
  testing::internal::CaptureStderr();
  Config config;
  config.stall_warn_s = 0.2;
  Ranks ranks(3, config);
  std::atomic<bool> is_inside{false};
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    if (rank == 0) {
      auto one = joining(engine);
      engine.submit(one, false);
      is_inside = true;
      EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
      return;
    }
    for (const uint64_t end = now_ns() + kPatienceNs; rank == 1 && !is_inside && now_ns() < end;)
      std::this_thread::yield();
    if (rank == 2) {  // keeps both others waiting: one inside join(), one in an allreduce
      const uint64_t deadline = now_ns() + kPatienceNs;
      while (ranks.count(Counters::stall_warnings) < 2 && now_ns() < deadline)
        std::this_thread::sleep_for(milliseconds(5));
    }
    done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
    join(engine);
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "stall: join() has waited ")) << log;
  EXPECT_TRUE(contains(log, " s for rank 1 (a thread), rank 2 (a thread)")) << log;
  EXPECT_TRUE(contains(log, "for rank 2 (a thread) (has joined: rank 0 (a thread))")) << log;
}

TEST(Join, IsNoStallWhileTheOthersWork) {
  Config config;
  config.stall_warn_s = 3, config.stall_end_s = 3.5;
  Ranks ranks(2, config);
  ranks.each([](Engine& engine, int rank) {
    for (const uint64_t end = now_ns() + 4 * kSecondNs; rank == 1 && now_ns() < end;) {
      std::this_thread::sleep_for(milliseconds(20));
      std::vector<float> x(10, 1);
      done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}));
    }
    join(engine);
  });
  EXPECT_EQ(ranks.count(Counters::stall_warnings), 0u);
}

}  // namespace
}  // namespace lightcc
