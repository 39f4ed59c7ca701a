// Ends of all kinds: a rank leaves, dies, stalls or is aborted. Whoever waits hears of it in time, with the first
// cause.
#include <barrier>
#include <chrono>

#include "ranks.h"

namespace lightcc {
namespace {

using namespace test;
using std::chrono::milliseconds;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Config stalling(double warn_s, double end_s) {
  Config config;
  config.stall_warn_s = warn_s, config.stall_end_s = end_s;
  return config;
}

RequestPtr allreduce(Engine& engine, std::vector<float>& x, const std::string& name = "x") {
  return request(engine, Kind::allreduce, name, {in_place(x)});
}

// ---- a rank leaves

class Leaving : public testing::TestWithParam<int> {};  // which rank of three
INSTANTIATE_TEST_SUITE_P(Ranks, Leaving, testing::Range(0, 3), testing::PrintToStringParamName());

TEST_P(Leaving, TheOthersHearOfItAndWhatWasCompleteStaysComplete) {
  const int leaver = GetParam();
  Ranks ranks(3);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> complete(50'000, 1), waiting(10, 1);
    auto first = allreduce(engine, complete, "complete"), second = allreduce(engine, waiting, "waiting");
    engine.submit(first, false);
    if (rank != leaver) engine.submit(second, false);
    EXPECT_EQ(finish(engine, first), Code::ok) << first->text;
    EXPECT_EQ(complete[49'999], 3);
    if (rank == leaver) return engine.shutdown();
    EXPECT_EQ(finish(engine, second), Code::shut_down);
    const std::string why = "rank " + std::to_string(leaver) + " (a thread) has left";
    EXPECT_TRUE(contains(second->text, "allreduce of tensor 'waiting': " + why)) << second->text;
    auto third = allreduce(engine, waiting, "later");
    EXPECT_EQ(run(engine, third), Code::shut_down);
    EXPECT_TRUE(contains(third->text, why)) << third->text;
  });
}

TEST_P(Leaving, ProcessSetsWithoutItGoOn) {
  const int leaver = GetParam();
  Ranks ranks(3);
  ranks.each([&](Engine& engine, int rank) {
    const int group = add_group(engine, {leaver == 0 ? 1 : 0, leaver == 2 ? 1 : 2});
    if (rank == leaver) return engine.shutdown();
    for (int i = 0; i < 50; ++i) {
      std::vector<float> x(1000, 1);
      done(engine, request(engine, Kind::allreduce, "", {in_place(x)}, group));
      EXPECT_EQ(x[999], 2);
    }
  });
}

// It announced its part and left before the data had moved, so that some ranks wait for it and others for those.
TEST_P(Leaving, InTheMiddleOfACollectiveLeavesNobodyBehind) {
  for (Kind kind : {Kind::allreduce, Kind::allgather, Kind::broadcast, Kind::alltoall}) {
    const int leaver = GetParam();
    Ranks ranks(5);
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> x(5 << 18, 1);
      auto one = request(engine, kind, "x", {in_place(x)});
      if (rank == leaver) {
        engine.submit(one, false);
        return engine.shutdown();
      }
      const Code code = outcome(engine, one);
      if (code == Code::ok) return;  // it needed nothing more of who left
      EXPECT_EQ(code, Code::shut_down);
      EXPECT_TRUE(contains(one->text, "rank " + std::to_string(leaver) + " (a thread) has left")) << one->text;
    });
  }
}

TEST(Ends, ShutdownFailsWhatIsPendingHereAndRefusesMore) {
  Ranks ranks(2);
  Engine& engine = ranks[0];
  std::vector<float> x(10, 1);
  auto one = allreduce(engine, x);
  std::thread waiter([&] { EXPECT_EQ(run(engine, one), Code::shut_down); });
  std::this_thread::sleep_for(milliseconds(30));
  engine.shutdown();
  waiter.join();
  EXPECT_TRUE(contains(one->text, "lightcc has been shut down on this rank")) << one->text;
  try {
    engine.submit(allreduce(engine, x, "y"), true);
    ADD_FAILURE() << "taken after shutdown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::shut_down);
  }
  engine.shutdown();  // twice is no harm
}

TEST(Ends, SharedMemoryIsReadableAfterShutdown) {
  std::shared_ptr<Arena> arena;
  std::byte* p = nullptr;
  {
    Ranks ranks(2);
    arena = ranks[0].arena();
    p = arena->allocate(10'000);
    p[9999] = std::byte(7);
  }
  EXPECT_EQ(p[9999], std::byte(7));
  arena->release(p);
}

// ---- a rank dies

TEST(Ends, ADeathIsHeardByAllWithinASecond) {
  for (int dead : {0, 2}) {
    Ranks ranks(4);
    std::barrier all_wait(4);
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> x(10, 1);
      done(engine, allreduce(engine, x, "before"));
      if (rank == dead) return all_wait.arrive_and_wait();
      auto one = allreduce(engine, x);
      engine.submit(one, true);
      all_wait.arrive_and_wait();
      const uint64_t begin = now_ns();
      if (rank == 1) engine.peer_ended(dead);  // one notices, and tells the others
      EXPECT_EQ(finish(engine, one), Code::peer_lost);
      EXPECT_LT(now_ns() - begin, kSecondNs);
      const std::string why = "rank " + std::to_string(dead) + " (a thread) died";
      EXPECT_EQ(one->text, "allreduce of tensor 'x': " + why);
      try {
        engine.submit(allreduce(engine, x, "y"), true);
        ADD_FAILURE() << "taken after the end";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::peer_lost);
        EXPECT_TRUE(contains(error.what(), why)) << error.what();
      }
    });
  }
}

TEST(Ends, ADeathIsHeardByRanksThatDoNothing) {
  for (int turn = 0; turn < 20; ++turn) {  // the engine thread is rung while it works, naps or sleeps
    Ranks ranks(3);
    std::this_thread::sleep_for(std::chrono::microseconds(100 * turn));
    ranks[0].peer_ended(1);
    const uint64_t deadline = now_ns() + 5 * kSecondNs;
    for (int rank : {0, 2}) {
      const auto heard = [&] {
        std::vector<float> x(10, 1);
        auto one = allreduce(ranks[rank], x);
        return outcome(ranks[rank], one) == Code::peer_lost;
      };
      EXPECT_TRUE(heard());
      EXPECT_LT(now_ns(), deadline);
    }
  }
}

TEST(Ends, ARankThatLeftInPeaceMayEndItsProcess) {
  Ranks ranks(3);
  const int group = 1;
  ranks.each([](Engine& engine, int) { add_group(engine, {0, 1}); });
  ranks[2].shutdown();
  for (int rank : {0, 1}) ranks[rank].peer_ended(2);
  ranks.each({0, 1}, [&](Engine& engine, int) {
    std::vector<float> x(10, 1);
    done(engine, request(engine, Kind::allreduce, "x", {in_place(x)}, group));
  });
}

TEST(Ends, TensorsInSharedMemoryKeepTheirContents) {
  Ranks ranks(2);
  std::byte* p = ranks[0].arena()->allocate(1 << 20);
  p[12345] = std::byte(9);
  ranks[0].abort("enough");
  EXPECT_EQ(p[12345], std::byte(9));
  ranks[0].arena()->release(p);
}

// ---- abort

TEST(Ends, AbortReachesEveryRankWithItsCause) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    if (rank == 2) return engine.abort("interrupted on rank 2");
    auto one = allreduce(engine, x);
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    EXPECT_TRUE(contains(one->text, "interrupted on rank 2")) << one->text;
  });
}

TEST(Ends, MemoryThatACallerRefusesEndsTheWaitOfAll) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    auto one = request(engine, Kind::allgather, "x", {input_of(x, {10})});
    if (rank == 1)
      one->callbacks.allocate = [](void*, int, const int64_t*, int) -> void* { return nullptr; };
    EXPECT_EQ(run(engine, one), Code::internal);
    EXPECT_TRUE(contains(one->text, "no memory for 80 bytes of output")) << one->text;
  });
}

// ---- stalls

class Stall : public testing::TestWithParam<int> {};  // who is missing, of three
INSTANTIATE_TEST_SUITE_P(Missing, Stall, testing::Range(0, 3), testing::PrintToStringParamName());

TEST_P(Stall, IsWarnedAboutOnceByNameAndGoesOn) {
  const int missing = GetParam();
  testing::internal::CaptureStderr();
  Ranks ranks(3, stalling(0.2, 0));
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    if (rank == missing) {
      const uint64_t deadline = now_ns() + kPatienceNs;
      while (ranks.count(Counters::stall_warnings) < 2 && now_ns() < deadline)
        std::this_thread::sleep_for(milliseconds(5));
    }
    done(engine, allreduce(engine, x));
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_GE(ranks.count(Counters::stall_warnings), 2u) << "on each rank that waits";
  const std::string line = "stall: allreduce of tensor 'x' has waited 0 s for rank " + std::to_string(missing) +
                           " (a thread) to submit it";
  EXPECT_TRUE(contains(log, line)) << log;
}

TEST_P(Stall, IsEndedWhenItLastsTooLong) {
  const int missing = GetParam();
  testing::internal::CaptureStderr();
  Ranks ranks(3, stalling(0.2, 0.5));
  ranks.each([&](Engine& engine, int rank) {
    if (rank == missing) return;
    std::vector<float> x(10, 1);
    auto one = allreduce(engine, x);
    const uint64_t begin = now_ns();
    EXPECT_EQ(run(engine, one), Code::timeout);
    EXPECT_GE(now_ns() - begin, kSecondNs / 4);  // another rank may have begun to wait before
    EXPECT_LT(now_ns() - begin, 10 * kSecondNs);
    EXPECT_TRUE(contains(one->text, "for rank " + std::to_string(missing) + " (a thread)")) << one->text;
    EXPECT_TRUE(contains(one->text, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")) << one->text;
  });
  testing::internal::GetCapturedStderr();
}

// As if stopped by a debugger: it does not even answer questions.
TEST_P(Stall, OfARankThatIsSilentIsEndedToo) {
  const int silent = GetParam();
  testing::internal::CaptureStderr();
  Ranks ranks(3, stalling(0.2, 0.5), {silent});
  std::vector<int> others;
  for (int rank = 0; rank < 3; ++rank)
    if (rank != silent) others.push_back(rank);
  ranks.each(others, [&](Engine& engine, int) {
    std::vector<float> x(10, 1);
    auto one = allreduce(engine, x);
    EXPECT_EQ(run(engine, one), Code::timeout);
    EXPECT_TRUE(contains(one->text, "for rank " + std::to_string(silent) + " (a thread)")) << one->text;
  });
  testing::internal::GetCapturedStderr();
}

TEST(Ends, SlowRanksAreNoStallIfTheCheckIsOff) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    if (rank == 1) std::this_thread::sleep_for(milliseconds(400));
    done(engine, allreduce(engine, x));
  });
  EXPECT_EQ(ranks.count(Counters::stall_warnings), 0u);
}

}  // namespace
}  // namespace lightcc
