// Engines on several hosts, where messages take their way over aggregators: ranks leave, join, stall and disagree.
#include <chrono>

#include "unit/helpers.h"
#include "labels.h"
#include "unit/ranks.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;
using std::chrono::milliseconds;

RequestPtr allreduce_in(Engine& engine, std::vector<float>& x, const std::string& name = "x", int group = 0) {
  return request(engine, Kind::allreduce, name, {in_place(x)}, group);
}
template <class Done>
bool soon(Done done) {
  for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline;
       std::this_thread::sleep_for(milliseconds(2)))
    if (done()) return true;
  return false;
}

const std::vector<int> kHosts = {2, 3, 1};  // leaders are ranks 0, 2 and 5

TEST(EngineTree, ManyRequestsInAnyOrderWithAndWithoutTheCache) {
  Ranks ranks(kHosts);
  ranks.each([&](Engine& engine, int rank) {
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<float>> x(10, std::vector<float>(100, 1));
      std::vector<RequestPtr> requests;
      for (int i = 0; i < 10; ++i) {
        const int one = rank % 2 ? i : 9 - i;
        requests.push_back(allreduce_in(engine, x[size_t(one)], "x" + std::to_string(one)));
        engine.submit(requests.back(), false);
      }
      for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
      for (auto& each : x) ASSERT_EQ(each[99], 6);
    }
    std::vector<float> rows(size_t(rank + 1), float(rank));
    auto gather = done(engine, request(engine, Kind::allgather, "g", {input_of(rows, {rank + 1})}));
    EXPECT_EQ(result<float>(*gather).size(), 21u);
  });
  EXPECT_GT(ranks.count(Counters::cached), 0u);
}

TEST(EngineTree, ADisagreementIsNamedOnAllHosts) {
  Ranks ranks(kHosts);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(rank == 4 ? 5 : 4, 1);
    auto one = allreduce_in(engine, x);
    EXPECT_EQ(run(engine, one), Code::mismatch);
    EXPECT_TRUE(contains(one->text, "ranks 0, 1, 2, 3, 5 have [4], rank 4 has [5]")) << one->text;
    std::vector<float> next(4, 1);
    done(engine, allreduce_in(engine, next));
    EXPECT_EQ(next[3], 6);
  });
}

class TreeLeaving : public testing::TestWithParam<int> {};  // the coordinator, a leaf of each kind, leaders
INSTANTIATE_TEST_SUITE_P(Ranks, TreeLeaving, testing::Values(0, 1, 2, 4, 5), testing::PrintToStringParamName());

TEST_P(TreeLeaving, TheOthersHearOfItAndWhatWasCompleteStaysComplete) {
  const int leaver = GetParam();
  Ranks ranks(kHosts);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> complete(50'000, 1), waiting(10, 1);
    auto first = allreduce_in(engine, complete, "complete"), second = allreduce_in(engine, waiting, "waiting");
    engine.submit(first, false);
    if (rank != leaver) engine.submit(second, false);
    EXPECT_EQ(finish(engine, first), Code::ok) << first->text;
    EXPECT_EQ(complete[49'999], 6);
    if (rank == leaver) return engine.shutdown();
    EXPECT_EQ(finish(engine, second), Code::shut_down);
    const std::string why = "rank " + std::to_string(leaver) + " (a thread)";
    EXPECT_TRUE(contains(second->text, "allreduce of tensor 'waiting': " + why)) << second->text;
    EXPECT_TRUE(contains(second->text, "has left (it shut down)")) << second->text;
    auto third = allreduce_in(engine, waiting, "later");
    EXPECT_EQ(outcome(engine, third), Code::shut_down);
    EXPECT_TRUE(contains(third->text, why)) << third->text;
  });
}

TEST_P(TreeLeaving, RanksThatDoNothingHearOfItToo) {
  const int leaver = GetParam();
  Ranks ranks(kHosts);
  ranks.each([&](Engine& engine, int) {
    std::vector<float> x(10, 1);
    done(engine, allreduce_in(engine, x, "before"));
  });
  ranks[leaver].shutdown();
  std::this_thread::sleep_for(milliseconds(20));
  for (int rank = 0; rank < 6; ++rank) {  // one after the other: nobody else does anything
    if (rank == leaver) continue;
    std::vector<float> x(10, 1);
    auto one = allreduce_in(ranks[rank], x);
    EXPECT_EQ(outcome(ranks[rank], one), Code::shut_down);
    EXPECT_TRUE(contains(one->text, "rank " + std::to_string(leaver) + " (a thread)")) << one->text;
  }
}

TEST_P(TreeLeaving, ProcessSetsWithoutItGoOn) {
  const int leaver = GetParam();
  Ranks ranks(kHosts);
  std::vector<int> others;
  for (int rank = 0; rank < 6; ++rank)
    if (rank != leaver) others.push_back(rank);
  ranks.each([&](Engine& engine, int rank) {
    const int group = add_group(engine, others);
    if (rank == leaver) return engine.shutdown();
    for (int i = 0; i < 30; ++i) {
      std::vector<float> x(1000, 1);
      done(engine, request(engine, Kind::allreduce, "", {in_place(x)}, group));
      EXPECT_EQ(x[999], 5);
    }
  });
}

TEST(EngineTree, RanksJoinAndTheOthersGoOn) {
  Ranks ranks(kHosts);
  ranks.each([&](Engine& engine, int rank) {
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int i = 0; i < (epoch ? 6 - rank : rank + 1); ++i) {
        std::vector<float> x(100, 1);
        done(engine, allreduce_in(engine, x, "x" + std::to_string(i % 3)));
        EXPECT_EQ(x[99], float(6 - i));
      }
      auto join = done(engine, request(engine, Kind::join, "", {}));
      EXPECT_EQ(join->last_joined, epoch ? 0 : 5);
    }
  });
}

// Who disagrees may sit on any host, and the world's coordinator does nothing meanwhile.
TEST(EngineTree, OnTheProcessSetRanksOfDifferentHostsDisagree) {
  for (auto [a, b] : {std::pair(1, 4), std::pair(0, 5), std::pair(3, 4)}) {
    Ranks ranks(kHosts);
    ranks.each([&, a = a, b = b](Engine& engine, int rank) {
      const int pair = add_group(engine, {a, b});
      const uint64_t begin = now_ns();
      for (const char* name : {"x", ""}) {
        std::vector<float> x(10, 1);
        if (rank != a && rank != b && rank != 2) continue;
        auto wrong = allreduce_in(engine, x, name, rank == a ? pair : 0);
        EXPECT_EQ(run(engine, wrong), Code::mismatch);
        EXPECT_TRUE(contains(wrong->text, "ranks disagree on the process set: rank " + std::to_string(a) +
                                              " gave it to process set 1 (ranks " + std::to_string(a) + ", " +
                                              std::to_string(b) + "), rank " + std::to_string(b) +
                                              " gave it to process set 0 (ranks 0, 1, 2, 3, 4, 5)"))
            << wrong->text;
      }
      EXPECT_TRUE((rank != a && rank != b) || now_ns() - begin < 10 * kSecondNs);
      if (rank != a && rank != b && rank != 2)
        for (const char* name : {"x", ""}) {  // is told when it comes to it
          std::vector<float> x(10, 1);
          EXPECT_EQ(run(engine, allreduce_in(engine, x, name)), Code::mismatch);
        }
      std::vector<float> next(10, 1);
      done(engine, allreduce_in(engine, next, ""));
      EXPECT_EQ(next[9], 6);
      if (rank == a || rank == b) done(engine, allreduce_in(engine, next, "", pair));
    });
  }
}

class TreeStall : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Missing, TreeStall, testing::Values(0, 1, 2, 4, 5), testing::PrintToStringParamName());

TEST_P(TreeStall, NamesWhoIsMissingAndNobodyElse) {
  const int missing = GetParam();
  Config config;
  config.stall_warn_s = 2;
  testing::internal::CaptureStderr();
  Ranks ranks(kHosts, config);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    done(engine, allreduce_in(engine, x, "connects"));
    if (rank == missing) soon([&] { return ranks.count(Counters::stall_warnings) >= 5; });
    done(engine, allreduce_in(engine, x));
  });
  const std::string log = testing::internal::GetCapturedStderr();
  for (int other = 0; other < 6; ++other)
    EXPECT_EQ(contains(log, "rank " + std::to_string(other) + " (a thread)"), other == missing) << log;
}

}  // namespace
}  // namespace lightcc
