// Engines as threads: many tensors in any order, fusion, the cache, waiting and polling.
#include "engine/engine.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "device/device.h"
#include "engine/request/names.h"
#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(on_hosts, "Engine.*:Sizes/Engines.*-*SideBySide*");
LABEL(as_placed, "Engine.TensorsSideBySide*");

namespace lightcc {
namespace {

using namespace test;

class Engines : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Engines, testing::Range(1, 6), testing::PrintToStringParamName());

TEST_P(Engines, AThousandTensorsInAnotherOrderOnEachRank) {
  constexpr int kTensors = 1000;
  const uint64_t seed = run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const int n = GetParam();
  Ranks ranks(n);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<std::vector<float>> tensors;
    for (int i = 0; i < kTensors; ++i) tensors.emplace_back(size_t(i % 50 + 1), float(i));
    std::vector<int> order(kTensors);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed + uint64_t(rank)));
    std::vector<RequestPtr> requests;
    for (int i : order) {
      requests.push_back(request(engine, Kind::allreduce, "t" + std::to_string(i), {in_place(tensors[size_t(i)])}));
      engine.submit(requests.back(), false);
    }
    for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
    for (int i = 0; i < kTensors; ++i)
      ASSERT_EQ(tensors[size_t(i)], std::vector<float>(size_t(i % 50 + 1), float(i * n))) << i;
  });
  EXPECT_EQ(ranks.count(Counters::requests), uint64_t(n * kTensors));
}

TEST_P(Engines, RankZeroKnowsWhatEachHasReportedLast) {
  Ranks ranks(GetParam());
  ranks.each([&](Engine& engine, int rank) {
    EXPECT_EQ(engine.reported(0), "");
    engine.report("an older one");
    engine.report("of rank " + std::to_string(rank));
    auto barrier = request(engine, Kind::barrier, "all", {});  // what came before it is taken in
    engine.submit(barrier, true);
    ASSERT_EQ(finish(engine, barrier), Code::ok) << barrier->text;
  });
  for (int rank = 0; rank < ranks.size(); ++rank) {
    EXPECT_EQ(ranks[0].reported(rank), "of rank " + std::to_string(rank));
    EXPECT_EQ(ranks[rank].reported(rank), rank == 0 ? "of rank 0" : "");
  }
  EXPECT_EQ(ranks[0].reported(-1) + ranks[0].reported(ranks.size()), "");
  EXPECT_EQ(ranks[0].waited_ns().size(), size_t(ranks.size()));
}

// Its engine thread sleeps without end, and what a rank of the same host reports rings no bell.
TEST(Engine, ReportsOfOthersAreTakenInWhileARankIsIdle) {
  Ranks ranks(std::vector<int>{2});
  for (int round = 0; round < 100; ++round) {
    const std::string text = std::to_string(round);
    ranks[1].report(text);
    for (const uint64_t deadline = now_ns() + kPatienceNs; ranks[0].reported(1) != text;) {
      ranks[0].report("its own");
      ASSERT_LT(now_ns(), deadline) << "round " << round;
    }
  }
}

TEST_P(Engines, StepsOfTheFastPathAreThoseOfTheOthers) {
  Ranks ranks(GetParam());
  ranks.each([&](Engine& engine, int) {
    std::vector<float> a(1, 1), b(1, 1);
    for (int step = 0; step < 3; ++step) {
      done(engine, request(engine, Kind::allreduce, "a", {in_place(a)}));
      ASSERT_EQ(negotiated(engine, request(engine, Kind::allreduce, "b", {in_place(b)})), Code::ok);
      ASSERT_EQ(negotiated(engine, request(engine, Kind::allreduce, "a", {in_place(a)})), Code::ok);
    }
  });
  EXPECT_EQ(ranks.count(Counters::steps), uint64_t(6 * ranks.size()));
}

TEST_P(Engines, StepsAndExposedTimeAreCounted) {
  Ranks ranks(GetParam());
  ranks.each([&](Engine& engine, int) {
    std::vector<float> a(100, 1), b(100, 1);
    for (int step = 0; step < 3; ++step) {
      std::vector<RequestPtr> requests{request(engine, Kind::allreduce, "a", {in_place(a)}),
                                       request(engine, Kind::allreduce, "b", {in_place(b)})};
      for (auto& one : requests) engine.submit(one, false);
      for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
    }
  });
  EXPECT_EQ(ranks.count(Counters::steps), uint64_t(3 * ranks.size()));
  EXPECT_GT(ranks.count(Counters::exposed_ns), 0u);
}

TEST(Engine, KindsAndDtypesInterleaved) {
  const uint64_t seed = run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Ranks ranks(4);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<std::vector<float>> floats(40, std::vector<float>(3000, 1));
    std::vector<std::vector<int32_t>> ints(40, std::vector<int32_t>(70, 1));
    std::vector<RequestPtr> requests;
    for (size_t i = 0; i < 40; ++i) {
      const std::string name = std::to_string(i);
      requests.push_back(request(engine, Kind::allreduce, name, {in_place(floats[i])}));
      requests.push_back(request(engine, Kind::allreduce, "int" + name, {in_place(ints[i])}));
      requests.push_back(request(engine, Kind::allgather, name, {input_of(ints[i], {7, 10})}));
      requests.push_back(request(engine, Kind::reducescatter, name, {input_of(floats[i], {3, 1000})}));
      requests.push_back(request(engine, Kind::barrier, name, {}));
    }
    std::shuffle(requests.begin(), requests.end(), std::mt19937_64(seed + uint64_t(rank)));
    for (auto& one : requests) engine.submit(one, false);
    for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->title() << one->text;
    for (size_t i = 0; i < 40; ++i) {
      EXPECT_EQ(floats[i], std::vector<float>(3000, 4));
      EXPECT_EQ(ints[i], std::vector<int32_t>(70, 4));
    }
  });
}

TEST(Engine, SeveralTensorsAreOneRequest) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> a(5, 1), b(100'000, 2);
    std::vector<int64_t> c(7, 3);
    std::vector<uint8_t> empty;
    done(engine, request(engine, Kind::allreduce, "mixed", {in_place(a), in_place(c), in_place(b), in_place(empty)}));
    EXPECT_EQ(a, std::vector<float>(5, 3));
    EXPECT_EQ(b, std::vector<float>(100'000, 6));
    EXPECT_EQ(c, std::vector<int64_t>(7, 9));

    std::vector<int32_t> rows(size_t(rank) + 1, rank), all{0, 1, 1, 2, 2, 2};
    auto gathered = done(engine, request(engine, Kind::allgather, "mixed",
                                         {input_of(rows, {rank + 1}), input_of(a, {5}), input_of(rows, {rank + 1})}));
    EXPECT_EQ(result<int32_t>(*gathered, 0), all);
    EXPECT_EQ(result<float>(*gathered, 1), std::vector<float>(15, 3));
    EXPECT_EQ(result<int32_t>(*gathered, 2), all);
  });
}

// ---- fusion

void submit_all(Engine& engine, std::vector<RequestPtr>& requests) {
  for (auto& one : requests) engine.submit(one, false);
  for (auto& one : requests) ASSERT_EQ(finish(engine, one), Code::ok) << one->text;
}

TEST(Engine, SmallTensorsRunTogetherUnlessFusionIsOff) {
  for (bool fusion : {true, false}) {
    Config config;
    config.fusion = fusion;
    Ranks ranks(3, config);
    ranks.each([](Engine& engine, int) {
      std::vector<std::vector<float>> tensors(300, std::vector<float>(64, 1));
      std::vector<RequestPtr> requests;
      for (size_t i = 0; i < tensors.size(); ++i)
        requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(tensors[i])}));
      submit_all(engine, requests);
      for (auto& tensor : tensors) ASSERT_EQ(tensor, std::vector<float>(64, 3));
    });
    EXPECT_EQ(ranks.count(Counters::fused_batches) > 0, fusion);
    EXPECT_EQ(ranks.count(Counters::fused_requests) > 0, fusion);
    EXPECT_EQ(ranks.count(Counters::batches) < 300u * 3, fusion);
  }
}

TEST(Engine, TensorsSideBySideInSharedMemoryAreNotCopied) {
  constexpr int64_t kCount = 16 << 10;  // above what runs flat
  Ranks ranks(2);
  uint64_t copied = 0;
  ranks.each([&](Engine& engine, int rank) {
    auto* data = reinterpret_cast<float*>(engine.arena()->allocate(20 * kCount * sizeof(float)));
    std::fill(data, data + 20 * kCount, 1.0f);
    done(engine, request(engine, Kind::barrier, "", {}));
    if (rank == 0) copied = copied_bytes() + staged_bytes();
    done(engine, request(engine, Kind::barrier, "", {}));
    std::vector<RequestPtr> requests;
    for (int64_t i = 0; i < 20; ++i)
      requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(data + i * kCount, kCount)}));
    submit_all(engine, requests);
    EXPECT_TRUE(std::all_of(data, data + 20 * kCount, [](float x) { return x == 2; }));
    done(engine, request(engine, Kind::barrier, "", {}));
    if (rank == 0) {
      EXPECT_EQ(copied_bytes() + staged_bytes(), copied);
    }
    done(engine, request(engine, Kind::barrier, "", {}));
    engine.arena()->release(reinterpret_cast<std::byte*>(data));
  });
}

TEST(Engine, RanksMayDifferInWhereTheirTensorsLie) {
  constexpr size_t kCount = 5000, kTensors = 20;
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> own(kCount * kTensors);
    auto* data = rank == 1 ? own.data()
                           : reinterpret_cast<float*>(engine.arena()->allocate(kCount * kTensors * sizeof(float)));
    std::fill(data, data + kCount * kTensors, 1.0f);
    std::vector<RequestPtr> requests;
    for (size_t i = 0; i < kTensors; ++i)
      requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(data + i * kCount, kCount)}));
    submit_all(engine, requests);
    EXPECT_TRUE(std::all_of(data, data + kCount * kTensors, [](float x) { return x == 3; }));
    if (rank != 1) engine.arena()->release(reinterpret_cast<std::byte*>(data));
  });
}

// ---- the cache

TEST(Engine, WhatWasSeenBeforeTravelsAsANumber) {
  for (int capacity : {1024, 3, 0}) {
    Config config;
    config.cache_capacity = capacity;
    Ranks ranks(3, config);
    const auto round = [&] {
      ranks.each([](Engine& engine, int rank) {
        std::vector<float> sum(10, 1), rows(size_t(rank) + 1, 1);
        negotiated(engine, request(engine, Kind::allreduce, "x", {in_place(sum)}));
        EXPECT_EQ(sum[9], 3);
        auto gathered = done(engine, request(engine, Kind::allgather, "x", {input_of(rows, {rank + 1})}));
        EXPECT_EQ(result<float>(*gathered).size(), 6u);
        done(engine, request(engine, Kind::barrier, "x", {}));
      });
    };
    round();
    EXPECT_EQ(ranks.count(Counters::cached), 0u);
    EXPECT_EQ(ranks.count(Counters::announced), 9u);
    for (int again = 0; again < 4; ++again) round();
    EXPECT_EQ(ranks.count(Counters::cached), capacity ? 36u : 0u);
    EXPECT_EQ(ranks.count(Counters::announced), capacity ? 9u : 45u);
  }
}

TEST(Engine, ACacheThatIsTooSmallIsOnlySlower) {
  const uint64_t seed = run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Config config;
  config.cache_capacity = 4;
  Ranks ranks(3, config);
  ranks.each([&](Engine& engine, int rank) {
    std::mt19937_64 random(seed + uint64_t(rank));
    for (int round = 0; round < 40; ++round) {
      std::vector<std::vector<float>> tensors(12, std::vector<float>(10, float(round)));
      std::vector<RequestPtr> requests;
      for (size_t i = 0; i < tensors.size(); ++i)
        requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(tensors[i])}));
      std::shuffle(requests.begin(), requests.end(), random);
      submit_all(engine, requests);
      for (auto& tensor : tensors) ASSERT_EQ(tensor, std::vector<float>(10, float(3 * round))) << round;
    }
  });
}

// ---- callers

TEST(Engine, WhatThisRankCanKnowIsRefusedAtSubmission) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(6, 1);
    const auto refused = [&](const RequestPtr& one, const std::string& why) {
      try {
        engine.submit(one, true);
        ADD_FAILURE() << one->title() << " was taken";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::invalid_argument);
        EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find(one->title()), std::string::npos) << error.what();
      }
    };
    refused(request(engine, Kind::allreduce, "x", {in_place(x)}, 5), "process set 5 does not exist");
    auto one = request(engine, Kind::broadcast, "x", {in_place(x)});
    one->what.root = 2;
    refused(one, "root rank 2 is not in process set 0 (ranks 0, 1)");
    std::vector<int32_t> whole(6, 1);
    one = request(engine, Kind::allreduce, "x", {in_place(x), in_place(whole)});
    one->what.op = ReduceOp::adasum;
    refused(one, "Adasum combines float16, bfloat16, float32 and float64 tensors, not int32");
    one->what.kind = Kind::reducescatter;
    refused(one, "Adasum combines whole tensors; reducescatter has every other operation");
    refused(request(engine, Kind::allgather, "x", {input_of(x, {})}), "a scalar has no dimension 0");
    refused(request(engine, Kind::alltoall, "x", {input_of(x, {3, 2})}),
            "3 rows cannot be split equally among 2 ranks");
    for (const auto& [splits, why] : {std::pair<Shape, const char*>{{1}, "1 splits for 2 ranks"},
                                      {{-1, 1}, "a split is negative"},
                                      {{4, 4}, "splits sum to 8, more than the 6 rows"}}) {
      one = request(engine, Kind::alltoall, "x", {input_of(x, {6})});
      one->what.splits = splits;
      refused(one, why);
    }
    if (rank == 0) {  // still in flight: rank 1 has not come yet
      auto first = request(engine, Kind::allreduce, "twice", {in_place(x)});
      engine.submit(first, false);
      refused(request(engine, Kind::allreduce, "twice", {in_place(x)}), "still in flight on rank 0");
      done(engine, request(engine, Kind::barrier, "", {}));
      EXPECT_EQ(finish(engine, first), Code::ok);
    } else {
      done(engine, request(engine, Kind::barrier, "", {}));
      done(engine, request(engine, Kind::allreduce, "twice", {in_place(x)}));
    }
    done(engine, request(engine, Kind::allreduce, "twice", {in_place(x)}));  // free again
  });
}

// Two of one name, submitted one after the other: whether the first is done by then makes no difference.
TEST(Engine, ANameWithAHandleIsTakenForAWhileThoughItsRequestIsDone) {
  Ranks ranks(1);
  Engine& engine = ranks[0];
  std::vector<float> x(10, 1);
  int refused = 0;
  for (int turn = 0; turn < 200; ++turn) {
    const std::string name = "x" + std::to_string(turn);
    const auto again = [&] { return request(engine, Kind::allreduce, name, {in_place(x)}); };
    auto first = again();
    engine.submit(first, false);
    while (!engine.poll(*first)) std::this_thread::yield();
    auto second = again();
    // Half of the time by a call that blocks, which has a shorter way.
    const uint64_t before = now_ns() - first->submitted_ns;
    const Code code = turn % 2 ? outcome(engine, second) : [&] {
      try {
        return engine.submit(second, false), finish(engine, second);
      } catch (const Error& error) {
        return second->text = error.what(), error.code();
      }
    }();
    if (code == Code::ok) {
      EXPECT_GE(now_ns() - first->submitted_ns, Names::kHoldNs);
      continue;
    }
    ++refused;
    EXPECT_EQ(code, Code::invalid_argument);
    EXPECT_LT(before, Names::kHoldNs);
    EXPECT_NE(second->text.find("'" + name + "': one of this name is still in flight on rank 0"), std::string::npos)
        << second->text;
    engine.give_back(*first);
    done(engine, again());
  }
  EXPECT_GT(refused, 0) << "a loaded machine may be late for most";
}

TEST(Engine, NamesWithoutAHandleAreFreeWhenTheirRequestIsDone) {
  Ranks ranks(1);
  Engine& engine = ranks[0];
  std::vector<float> x(10, 1);
  for (int turn = 0; turn < 100; ++turn) {
    auto blocking = request(engine, Kind::broadcast, "x", {in_place(x)});
    engine.submit(blocking, true);
    while (!engine.wait(*blocking, now_ns() + kSecondNs)) continue;
    std::atomic<bool> called{false};
    auto with_callback = request(engine, Kind::broadcast, "x", {in_place(x)});
    with_callback->callbacks.context = &called;
    with_callback->callbacks.done = [](void* flag, int, const char*) { *static_cast<std::atomic<bool>*>(flag) = true; };
    engine.submit(with_callback, false);
    while (!called) engine.poll(*with_callback);
  }
}

TEST(Engine, PollSaysNoUntilItIsDoneAndWaitKeepsItsDeadline) {
  Ranks ranks(2);
  std::atomic<bool> looked{false};
  ranks.each([&](Engine& engine, int rank) {
    std::vector<std::vector<float>> tensors(100, std::vector<float>(100, 1));
    std::vector<RequestPtr> requests;
    for (size_t i = 0; i < tensors.size(); ++i)
      requests.push_back(request(engine, Kind::allreduce, std::to_string(i), {in_place(tensors[i])}));
    while (rank == 1 && !looked) std::this_thread::yield();
    for (auto& one : requests) engine.submit(one, false);
    if (rank == 0) {
      for (auto& one : requests) EXPECT_FALSE(engine.poll(*one));
      const uint64_t begin = now_ns();
      EXPECT_FALSE(engine.wait(*requests[0], begin + 30'000'000));
      EXPECT_GE(now_ns() - begin, 30'000'000u);
      EXPECT_LT(now_ns() - begin, 5 * kSecondNs);
      EXPECT_FALSE(engine.wait(*requests[0], 0)) << "a deadline that has passed";
      looked = true;
    }
    const uint64_t deadline = now_ns() + kPatienceNs;  // nobody waits: polling alone must get there
    for (auto& one : requests)
      while (!engine.poll(*one)) {
        ASSERT_LT(now_ns(), deadline);
        std::this_thread::yield();
      }
    for (auto& one : requests) EXPECT_EQ(one->code, Code::ok);
  });
}

TEST(Engine, NobodyNeedsToWaitOrPoll) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int) {
    std::vector<float> x(100'000, 1);
    auto one = request(engine, Kind::allreduce, "x", {in_place(x)});
    engine.submit(one, false);
    const uint64_t deadline = now_ns() + kPatienceNs;
    while (!one->finished && now_ns() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_TRUE(one->finished) << "the engine thread did not run it";
    EXPECT_EQ(x[99'999], 2);
  });
}

TEST(Engine, ManyThreadsOfOneRankSubmitAndWait) {
  constexpr int kThreads = 4, kRounds = 50;
  Ranks ranks(2);
  ranks.each([](Engine& engine, int) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&engine, thread] {
        for (int round = 0; round < kRounds; ++round) {
          std::vector<float> x(size_t(thread) * 3000 + 1, 1);
          done(engine, request(engine, Kind::allreduce, "thread" + std::to_string(thread), {in_place(x)}));
          ASSERT_EQ(x.back(), 2);
        }
      });
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(Engine, SeveralThreadsMayWaitForOneRequest) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(1000, 1);
    auto one = request(engine, Kind::allreduce, "x", {in_place(x)});
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    engine.submit(one, true);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back([&] { EXPECT_EQ(finish(engine, one), Code::ok); });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(x[999], 2);
  });
}

struct Called {
  std::vector<float> memory;
  Shape shape;
  int index = -1, allocations = 0;
  std::atomic<int> status{-1}, dones{0};
  std::string text;
  static void done(void* context, int status, const char* text) {
    auto& called = *static_cast<Called*>(context);
    called.text = text, called.status = status, ++called.dones;
  }
  static void* allocate(void* context, int index, const int64_t* shape, int ndim) {
    auto& called = *static_cast<Called*>(context);
    called.index = index, called.shape.assign(shape, shape + ndim), ++called.allocations;
    called.memory.resize(size_t(count_of(called.shape)));
    return called.memory.data();
  }
};

TEST(Engine, CallbacksAllocateAndTellTheEndOnce) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    Called called;
    std::vector<float> rows(size_t(rank) * 2, float(rank));
    auto one = request(engine, Kind::allgather, "x", {input_of(rows, {rank, 2})});
    one->callbacks = {Called::done, Called::allocate, &called};
    engine.submit(one, false);
    const uint64_t deadline = now_ns() + kPatienceNs;
    while (called.dones == 0 && now_ns() < deadline) std::this_thread::yield();
    EXPECT_EQ(called.status, int(Code::ok));
    EXPECT_EQ(called.index, 0);
    EXPECT_EQ(called.shape, (Shape{3, 2}));
    EXPECT_EQ(called.memory, (std::vector<float>{1, 1, 2, 2, 2, 2}));
    done(engine, request(engine, Kind::barrier, "", {}));
    EXPECT_EQ(called.dones, 1);
    EXPECT_EQ(called.allocations, 1);
  });
}

}  // namespace
}  // namespace lightcc
