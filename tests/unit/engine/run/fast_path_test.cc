// Calls that skip negotiation: every size and number of ranks, and every way in which one must fall back to it. On
// several hosts calls of two ranks skip it, and those of more are negotiated.
#include "engine/run/fast_path.h"

#include <random>

#include "device/device.h"
#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(on_hosts);

namespace lightcc::test {
namespace {

constexpr int64_t kSizes[] = {1, 12, 13, 1000, 4096, 4097, 300000};  // in the line, beside it, and beyond

bool has_fast_path(Ranks& ranks) {
  return ranks.size() <= 2 || ranks[0].topology().hosts.size() == 1;
}

std::vector<float> filled(int64_t count, int rank) {
  std::vector<float> data(static_cast<size_t>(count));
  for (size_t i = 0; i < data.size(); ++i) data[i] = float(int(i % 7) + rank);
  return data;
}
std::vector<float> sum_of(int64_t count, int ranks) {
  std::vector<float> data(static_cast<size_t>(count));
  for (size_t i = 0; i < data.size(); ++i) data[i] = float(int(i % 7) * ranks + ranks * (ranks - 1) / 2);
  return data;
}

TEST(FastPath, AddsUpOnAnyNumberOfRanks) {
  for (int n = 1; n <= 5; ++n) {
    Ranks ranks(n);
    ranks.each([n](Engine& engine, int rank) {
      for (int64_t count : kSizes)
        for (bool named : {true, false}) {
          const std::vector<float> in = filled(count, rank);
          std::vector<float> out(in.size());
          auto call = request(engine, Kind::allreduce, named ? "x" : "",
                              {{DType::float32, {count}, in.data(), out.data()}});
          done(engine, call);
          ASSERT_EQ(out, sum_of(count, n)) << count;
          ASSERT_EQ(in, filled(count, rank));
        }
    });
    EXPECT_EQ(ranks.count(Counters::requests), uint64_t(n) * std::size(kSizes) * 2);
    EXPECT_EQ(ranks.count(Counters::fast_path) > 0, has_fast_path(ranks));
  }
}

TEST(FastPath, IsTakenWhenNothingElseIsInFlight) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int) {
    for (int i = 0; i < 50; ++i) {
      std::vector<float> data(10, 1);
      done(engine, request(engine, Kind::allreduce, "x", {in_place(data)}));
      ASSERT_EQ(data[9], 2);
    }
  });
  // On a loaded machine a rank's own engine thread may hold the progress lock for once.
  EXPECT_GT(ranks.count(Counters::fast_path), 50u);  // of 100
}

TEST(FastPath, SharedMemoryIsReducedInPlace) {
  Ranks ranks(std::vector<int>{3});
  const uint64_t copied = copied_bytes() + staged_bytes();
  constexpr int64_t kCount = 100000;
  ranks.each([](Engine& engine, int rank) {
    auto* data = reinterpret_cast<float*>(engine.arena()->allocate(kCount * sizeof(float)));
    std::fill(data, data + kCount, float(rank));
    done(engine, request(engine, Kind::allreduce, "x", {in_place(data, kCount)}));
    EXPECT_TRUE(std::all_of(data, data + kCount, [](float x) { return x == 3; }));
    engine.arena()->release(reinterpret_cast<std::byte*>(data));
  });
  EXPECT_EQ(copied_bytes() + staged_bytes(), copied);
}

TEST(FastPath, EveryOperationAndFactor) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    const double values[] = {1.0 + rank, 4.0 - rank};
    const auto check = [&](ReduceOp op, double pre, double post, double first, double second) {
      std::vector<double> out(2);
      auto call = request(engine, Kind::allreduce, "x", {{DType::float64, {2}, values, out.data()}});
      call->what.op = op, call->what.pre = pre, call->what.post = post;
      done(engine, call);
      EXPECT_DOUBLE_EQ(out[0], first) << name_of(op);
      EXPECT_DOUBLE_EQ(out[1], second) << name_of(op);
    };
    check(ReduceOp::sum, 1, 1, 6, 9);
    check(ReduceOp::sum, 2, 0.25, 3, 4.5);
    check(ReduceOp::average, 1, 1, 2, 3);
    check(ReduceOp::min, 1, 1, 1, 2);
    check(ReduceOp::max, 1, 2, 6, 8);
    check(ReduceOp::product, 1, 1, 6, 24);
  });
}

TEST(FastPath, MeetsAnAsynchronousCallOfTheSameName) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    for (int i = 0; i < 60; ++i) {
      std::vector<float> data(100, 1);
      auto call = request(engine, Kind::allreduce, "x", {in_place(data)});
      if (i % 3 == rank) {
        engine.submit(call, false);
        ASSERT_EQ(finish(engine, call), Code::ok) << call->text;
      } else {
        done(engine, call);
      }
      ASSERT_EQ(data, std::vector<float>(100, 3));
    }
  });
}

TEST(FastPath, WaitsBehindNothingAndBlocksNothing) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> first(50000, 1), second(10, 1);
    auto asynchronous = request(engine, Kind::allreduce, "first", {in_place(first)});
    auto blocking = request(engine, Kind::allreduce, "second", {in_place(second)});
    // Rank 0 has the first in flight while it waits for the second; rank 1 comes the other way round.
    if (rank == 0) engine.submit(asynchronous, false);
    done(engine, blocking);
    if (rank == 1) engine.submit(asynchronous, false);
    EXPECT_EQ(finish(engine, asynchronous), Code::ok);
    EXPECT_EQ(first, std::vector<float>(50000, 2));
    EXPECT_EQ(second, std::vector<float>(10, 2));
  });
}

TEST(FastPath, DifferentCallsAreAMismatchThatNamesThem) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    for (int64_t count : kSizes) {
      std::vector<float> data(static_cast<size_t>(count) + 1, 1);
      auto wrong = request(engine, Kind::allreduce, "x", {in_place(data.data(), count + rank)});
      EXPECT_EQ(run(engine, wrong), Code::mismatch);
      EXPECT_NE(wrong->text.find("ranks disagree on shape"), std::string::npos) << wrong->text;
      EXPECT_EQ(data[0], 1) << "a failed call wrote its output";
    }
  });
}

TEST(FastPath, ProcessSetsHaveTheirOwn) {
  Ranks ranks(4);
  ranks.each([](Engine& engine, int rank) {
    const int low = add_group(engine, {0, 1, 2}), high = add_group(engine, {1, 2, 3});
    for (int i = 0; i < 40; ++i)
      for (int group : {low, high}) {
        if (rank == (group == low ? 3 : 0)) continue;
        std::vector<float> data(20, float(rank));
        done(engine, request(engine, Kind::allreduce, "x", {in_place(data)}, group));
        ASSERT_EQ(data[19], group == low ? 3 : 6);
      }
  });
}

TEST(FastPath, ARemovedSetsLinesServeTheNext) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    for (int i = 1; i <= 6; ++i) {  // ends in odd and in even turns
      const int group = add_group(engine, {0, 2});
      for (int k = 0; k < i && rank != 1; ++k) {
        std::vector<float> data(5, 1);
        done(engine, request(engine, Kind::allreduce, "x", {in_place(data)}, group));
        ASSERT_EQ(data[4], 2);
      }
      remove_group(engine, group);
    }
  });
}

TEST(FastPath, ARankThatComesLateIsWaitedFor) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    for (int late = 0; late < 3; ++late) {
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(150));  // longer than until the reminder
      std::vector<float> data(10, 1);
      done(engine, request(engine, Kind::allreduce, "", {in_place(data)}));
      ASSERT_EQ(data[0], 3);
    }
  });
}

TEST(FastPath, ARankThatLeavesIsNamed) {
  for (bool coordinator : {true, false}) {
    Ranks ranks(3);
    ranks.each([&](Engine& engine, int rank) {
      if (rank == (coordinator ? 0 : 2)) return engine.shutdown();
      std::vector<float> data(10, 1);
      auto call = request(engine, Kind::allreduce, "x", {in_place(data)});
      EXPECT_EQ(outcome(engine, call), Code::shut_down);
      EXPECT_NE(call->text.find(coordinator ? "rank 0" : "rank 2"), std::string::npos) << call->text;
    });
  }
}

TEST(FastPath, ARankThatNeverComesIsAStallThatNamesIt) {
  Config config;
  config.stall_warn_s = 0.2, config.stall_end_s = 0.6;
  Ranks ranks(3, config, {2});
  ranks.each({0, 1}, [](Engine& engine, int) {
    std::vector<float> data(10, 1);
    auto call = request(engine, Kind::allreduce, "x", {in_place(data)});
    EXPECT_EQ(outcome(engine, call), Code::timeout) << call->text;
    EXPECT_NE(call->text.find("rank 2"), std::string::npos) << call->text;
  });
}

TEST(FastPath, ThreadsOfOneRankMayAllBlock) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < 40; ++i) {
          std::vector<float> data(size_t(t == 2 ? 20000 : 10), float(rank + t));
          done(engine, request(engine, Kind::allreduce, "thread" + std::to_string(t), {in_place(data)}));
          ASSERT_EQ(data.back(), float(2 * t + 1));
        }
      });
    for (auto& thread : threads) thread.join();
  });
}

// Any mixture: each rank draws by itself whether a call blocks, and computes for a while.
TEST(FastPath, AnyMixtureGivesTheSameSums) {
  const uint64_t seed = run_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (int n : {2, 3, 4}) {
    Ranks ranks(n);
    ranks.each([&](Engine& engine, int rank) {
      std::mt19937 own(static_cast<uint32_t>(seed) + static_cast<uint32_t>(rank)), common(static_cast<uint32_t>(seed));
      for (int i = 0; i < 150; ++i) {
        const int64_t count = kSizes[common() % std::size(kSizes)];
        std::vector<float> first = filled(count, rank), second = filled(7, rank);
        auto blocking = request(engine, Kind::allreduce, "a", {in_place(first)});
        auto other = request(engine, Kind::allreduce, "b", {in_place(second)});
        if (own() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
        const bool early = own() % 2, asynchronous = own() % 2;
        if (early) engine.submit(other, false);
        if (asynchronous) engine.submit(blocking, false);
        ASSERT_EQ(asynchronous ? finish(engine, blocking) : run(engine, blocking), Code::ok) << blocking->text;
        if (!early) engine.submit(other, false);
        ASSERT_EQ(finish(engine, other), Code::ok) << other->text;
        ASSERT_EQ(first, sum_of(count, n));
        ASSERT_EQ(second, sum_of(7, n));
      }
    });
  }
}

}  // namespace
}  // namespace lightcc::test
