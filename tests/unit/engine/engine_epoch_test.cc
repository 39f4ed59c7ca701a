// Ends of all kinds: a rank leaves, dies, stalls or is aborted. Whoever waits hears of it in time, with the first
// cause.
#include <atomic>
#include <barrier>
#include <chrono>

#include "unit/helpers.h"
#include "labels.h"
#include "unit/ranks.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;
using std::chrono::milliseconds;

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

// Of two that leave the second must not hide the first: who leaves because another has left says so. On one host and on
// three.
TEST_P(Leaving, TheFirstCauseTravelsWithThoseItHits) {
  const int leaver = GetParam(), hit = (leaver + 1) % 3, last = (leaver + 2) % 3;
  const std::string cause = "rank " + std::to_string(leaver) + " (a thread) has left (it ended with ValueError: bad)";
  for (const std::vector<int>& hosts : {std::vector{3}, std::vector{1, 1, 1}}) {
    Ranks ranks(hosts);
    std::atomic<bool> hit_has_left{false};
    ranks.each([&](Engine& engine, int rank) {
      const int pair = add_group(engine, {std::min(hit, last), std::max(hit, last)});
      std::vector<float> x(10, 1);
      if (rank == leaver) return engine.shutdown("it ended with ValueError: bad");
      if (rank == hit) {
        auto one = allreduce(engine, x);
        EXPECT_EQ(outcome(engine, one), Code::shut_down);
        EXPECT_EQ(one->text, "allreduce of tensor 'x': " + cause);
        engine.shutdown("its program has ended");
        hit_has_left = true;
        return;
      }
      while (!hit_has_left) std::this_thread::sleep_for(milliseconds(1));
      auto one = request(engine, Kind::allreduce, "y", {in_place(x)}, pair);
      EXPECT_EQ(outcome(engine, one), Code::shut_down);
      EXPECT_EQ(one->text,
                "allreduce of tensor 'y': rank " + std::to_string(hit) + " (a thread) has left after " + cause);
    });
  }
}

// Whether it is so before a test's patience has run out.
template <class Condition> bool comes(Condition is_so) {
  for (const uint64_t deadline = now_ns() + kPatienceNs; !is_so() && now_ns() < deadline;)
    std::this_thread::sleep_for(milliseconds(1));
  return is_so();
}

// A callback of rank 2 runs from before the set is agreed on until the others have it and have left.
TEST(LeavingEarly, AProcessSetHearsOfMembersThatHaveLeftBeforeItIsThere) {
  struct {
    std::atomic<bool> busy{false};
    std::atomic<int> left{0};
  } seen;
  Ranks ranks(3);
  std::barrier submitted(3);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1), y(10, 1);
    auto first = allreduce(engine, x);
    auto added = request(engine, Kind::add_group, "", {Tensor{DType::uint8, {1, 2}, nullptr, nullptr}});
    if (rank < 2) {
      submitted.arrive_and_wait();
      EXPECT_EQ(run(engine, first), Code::ok);
      EXPECT_TRUE(comes([&] { return seen.busy.load(); }));
      EXPECT_EQ(negotiated(engine, added), Code::ok);
      engine.shutdown();
      ++seen.left;
      return;
    }
    first->callbacks.context = &seen;
    first->callbacks.done = [](void* context, int, const char*) {
      auto& all = *static_cast<decltype(seen)*>(context);
      all.busy = true;
      EXPECT_TRUE(comes([&] { return all.left == 2; }));
    };
    engine.submit(first, false);
    engine.submit(added, false);
    submitted.arrive_and_wait();
    EXPECT_EQ(finish(engine, added), Code::ok);
    auto one = request(engine, Kind::allreduce, "y", {in_place(y)}, added->changed_group);
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    EXPECT_TRUE(contains(one->text, "rank 1 (a thread) has left")) << one->text;
  });
}

TEST_P(Leaving, WithWorkInFlightSaysWhy) {
  const int leaver = GetParam();
  Ranks ranks(3);
  std::barrier all_local(3);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    all_local.arrive_and_wait();
    auto one = allreduce(engine, x, "x" + std::to_string(rank));  // nobody else's
    if (rank == leaver) {
      engine.submit(one, false);
      return engine.shutdown("it ended with " + std::string(5000, '!'));
    }
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    const std::string who = "rank " + std::to_string(leaver) + " (a thread)";
    const std::string why = one->title() + ": " + who + " has left (it ended with !!!";
    EXPECT_TRUE(one->text.starts_with(why)) << one->text;
    EXPECT_TRUE(one->text.ends_with("!!!), with work in flight")) << one->text;
    EXPECT_LT(one->text.size(), 500u);
    EXPECT_TRUE(engine.failure().ends_with("!!!), with work in flight")) << engine.failure();
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

TEST(EpochEnd, ShutdownFailsWhatIsPendingHereAndRefusesMore) {
  Ranks ranks(2);
  Engine& engine = ranks[0];
  std::vector<float> x(10, 1);
  auto one = allreduce(engine, x);
  engine.submit(one, true);
  std::thread waiter([&] { EXPECT_EQ(finish(engine, one), Code::shut_down); });
  std::this_thread::sleep_for(milliseconds(30));  // in which the thread has usually begun to wait
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

TEST(EpochEnd, SharedMemoryIsReadableAfterShutdown) {
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

TEST(EpochEnd, ADeathIsHeardByAll) {
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
      EXPECT_LT(now_ns() - begin, kPatienceNs / 2);
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

TEST(EpochEnd, ADeathIsHeardByRanksThatDoNothing) {
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

TEST(EpochEnd, ARankThatLeftInPeaceMayEndItsProcess) {
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

TEST(EpochEnd, TensorsInSharedMemoryKeepTheirContents) {
  Ranks ranks(2);
  std::byte* p = ranks[0].arena()->allocate(1 << 20);
  p[12345] = std::byte(9);
  ranks[0].abort("enough");
  EXPECT_EQ(p[12345], std::byte(9));
  ranks[0].arena()->release(p);
}

// ---- abort

TEST(EpochEnd, AbortReachesEveryRankWithItsCause) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    if (rank == 2) return engine.abort("interrupted on rank 2");
    auto one = allreduce(engine, x);
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    EXPECT_TRUE(contains(one->text, "interrupted on rank 2")) << one->text;
  });
}

TEST(EpochEnd, MemoryThatACallerRefusesEndsTheWaitOfAll) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    auto one = request(engine, Kind::allgather, "x", {input_of(x, {10})});
    if (rank == 1)
      one->callbacks.allocate = [](void*, int, const int64_t*, int) -> void* { return nullptr; };
    EXPECT_EQ(run(engine, one), Code::internal);
    EXPECT_EQ(one->text, "allgather of tensor 'x': rank 1 (a thread): no memory for 80 bytes of output of allgather of "
                         "tensor 'x'");
  });
}

// ---- stalls

class Stall : public testing::TestWithParam<int> {};  // who is missing, of three
INSTANTIATE_TEST_SUITE_P(Missing, Stall, testing::Range(0, 3), testing::PrintToStringParamName());

TEST_P(Stall, IsWarnedAboutOnceByNameAndGoesOn) {
  const int missing = GetParam();
  testing::internal::CaptureStderr();
  Ranks ranks(3, stalling(0.2, 0));
  std::barrier others_come(2);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1);
    if (rank == missing) {
      const uint64_t deadline = now_ns() + kPatienceNs;
      while (ranks.count(Counters::stall_warnings) < 2 && now_ns() < deadline)
        std::this_thread::sleep_for(milliseconds(5));
    } else {
      others_come.arrive_and_wait();
    }
    done(engine, allreduce(engine, x));
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_GE(ranks.count(Counters::stall_warnings), 2u) << "on each rank that waits";
  EXPECT_TRUE(contains(log, "stall: allreduce of tensor 'x' has waited ")) << log;
  EXPECT_TRUE(contains(log, " s for rank " + std::to_string(missing) + " (a thread) to submit it")) << log;
}

TEST_P(Stall, IsEndedWhenItLastsTooLong) {
  const int missing = GetParam();
  testing::internal::CaptureStderr();
  Ranks ranks(3, stalling(0.5, 2));
  std::barrier others_come(2);
  ranks.each([&](Engine& engine, int rank) {
    if (rank == missing) return;
    std::vector<float> x(10, 1);
    auto one = allreduce(engine, x);
    others_come.arrive_and_wait();
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
  Ranks ranks(3, stalling(0.5, 2), {silent});
  std::barrier others_come(2);
  std::vector<int> others;
  for (int rank = 0; rank < 3; ++rank)
    if (rank != silent) others.push_back(rank);
  ranks.each(others, [&](Engine& engine, int) {
    std::vector<float> x(10, 1);
    auto one = allreduce(engine, x);
    others_come.arrive_and_wait();
    EXPECT_EQ(run(engine, one), Code::timeout);
    EXPECT_TRUE(contains(one->text, "for rank " + std::to_string(silent) + " (a thread)")) << one->text;
  });
  testing::internal::GetCapturedStderr();
}

// Two ranks that wait for each other: the warning shows both ends.
TEST(EpochEnd, AStallSaysWhatTheLateRankWaitsForItself) {
  for (const std::vector<int>& hosts : {std::vector{2}, std::vector{1, 1}}) {
    testing::internal::CaptureStderr();
    Ranks ranks(hosts, stalling(0.3, 1.5));
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> x(10, 1);
      auto one = allreduce(engine, x, rank == 0 ? "a" : "b");
      EXPECT_EQ(run(engine, one), Code::timeout);
    });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(contains(log, "stall: allreduce of tensor 'a' has waited ")) << log;
    EXPECT_TRUE(contains(log, " s for rank 1 (a thread) to submit it or to go on. Of those, rank 1 itself waits for "
                              "allreduce of tensor 'b', for which rank 0 (a thread) has not come")) << log;
    EXPECT_TRUE(contains(log, "Of those, rank 0 itself waits for allreduce of tensor 'a', for which rank 1")) << log;
  }
}

// Long before it is a stall; the job ends only then.
TEST(EpochEnd, ADeadlockIsWarnedAboutOnceByBothEnds) {
  for (const std::vector<int>& hosts : {std::vector{2}, std::vector{1, 1}}) {
    testing::internal::CaptureStderr();
    Config config = stalling(60, 3);
    config.deadlock_s = 0.2;
    Ranks ranks(hosts, config);
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> x(10, 1);
      auto one = allreduce(engine, x, rank == 0 ? "a" : "b");
      const uint64_t begin = now_ns();
      EXPECT_EQ(run(engine, one), Code::timeout);
      EXPECT_GE(now_ns() - begin, 2 * kSecondNs) << "nothing is ended sooner";
    });
    const std::string log = testing::internal::GetCapturedStderr();
    const std::string a = "rank 0 (a thread) waits in allreduce of tensor 'a' for rank 1 (a thread)",
                      b = "rank 1 (a thread) waits in allreduce of tensor 'b' for rank 0 (a thread)",
                      head = "deadlock: ranks wait for each other, and none of them can go on: ";
    EXPECT_TRUE(contains(log, head + a + "; " + b + ". Is ") || contains(log, head + b + "; " + a + ". Is ")) << log;
    EXPECT_EQ(log.find("deadlock: "), log.rfind("deadlock: ")) << log;
  }
}

TEST(EpochEnd, ADeadlockThroughTwoProcessSetsIsWarnedAboutOnce) {
  for (const std::vector<int>& hosts : {std::vector{3}, std::vector{1, 1, 1}}) {
    testing::internal::CaptureStderr();
    Config config = stalling(60, 3);
    config.deadlock_s = 0.2;
    Ranks ranks(hosts, config);
    ranks.each([&](Engine& engine, int rank) {
      const int group = add_group(engine, {1, 2});
      std::vector<float> x(10, 1);
      const bool in_group = rank == 2;
      auto one = request(engine, Kind::allreduce, in_group ? "b" : "a", {in_place(x)}, in_group ? group : 0);
      EXPECT_EQ(run(engine, one), Code::timeout);
    });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_TRUE(contains(log, "deadlock: ranks wait for each other, and none of them can go on: rank 1 (a thread) "
                              "waits in allreduce of tensor 'a' in process set 0 (ranks 0, 1, 2) for rank 2 (a "
                              "thread); rank 2 (a thread) waits in allreduce of tensor 'b' in process set 1 (ranks 1, "
                              "2) for rank 1 (a thread). Is ")) << log;
    EXPECT_EQ(log.find("deadlock: "), log.rfind("deadlock: ")) << log;
  }
}

// A rank that computes is late, but in no deadlock, and what the others wait for runs once it has come.
TEST(EpochEnd, ALateRankIsNoDeadlock) {
  testing::internal::CaptureStderr();
  Config config = stalling(1.5, 0);
  config.deadlock_s = 0.1;
  Ranks ranks(3, config);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> x(10, 1), y(10, 1);
    auto wait_for = [&](uint64_t warnings) {
      const uint64_t deadline = now_ns() + kPatienceNs;
      while (ranks.count(Counters::stall_warnings) < warnings && now_ns() < deadline)
        std::this_thread::sleep_for(milliseconds(5));
    };
    auto a = allreduce(engine, x, "a"), b = allreduce(engine, y, "b");
    if (rank == 1) engine.submit(a, false);  // it is there for rank 0, but waits for b first
    if (rank == 2) wait_for(2);              // of stalls: by then a deadlock would have been told
    if (rank == 2) engine.submit(b, false);
    if (rank != 1) done(engine, a);
    if (rank != 2) done(engine, b);
    if (rank != 0) {
      EXPECT_TRUE(engine.wait(rank == 1 ? *a : *b, now_ns() + kPatienceNs));
    }
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "stall: ")) << log;
  EXPECT_FALSE(contains(log, "deadlock: ")) << log;
}

TEST(EpochEnd, AStallSaysInWhichProcessSetTheLateRankWaits) {
  testing::internal::CaptureStderr();
  Ranks ranks(2, stalling(0.7, 1.8));
  ranks.each([&](Engine& engine, int rank) {
    const int group = add_group(engine, {0, 1});
    std::vector<float> x(10, 1);
    auto one = request(engine, rank == 0 ? Kind::allreduce : Kind::barrier, rank == 0 ? "a" : "",
                       rank == 0 ? std::vector{in_place(x)} : std::vector<Tensor>{}, rank == 0 ? group : 0);
    EXPECT_EQ(run(engine, one), Code::timeout);
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "stall: barrier() has waited")) << log;
  EXPECT_TRUE(contains(log, "Of those, rank 1 itself waits for barrier() in process set 0 (ranks 0, 1)")) << log;
  EXPECT_TRUE(contains(log, "Of those, rank 0 itself waits for allreduce of tensor 'a' in process set 1 (ranks 0, 1)"))
      << log;
}

// One rank has refused what the others wait for.
TEST_P(Stall, NamesTheRankThatRefusedIt) {
  const int refuser = GetParam();
  for (const std::vector<int>& hosts : {std::vector{3}, std::vector{1, 1, 1}}) {
    testing::internal::CaptureStderr();
    Ranks ranks(hosts, stalling(0.3, 0));
    std::atomic<bool> refused{false};
    std::atomic<int> passed{0};
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> x(10, 1), y(10, 1);
      auto first = allreduce(engine, x);
      if (rank != refuser) {
        while (!refused) std::this_thread::sleep_for(milliseconds(1));
        EXPECT_EQ(negotiated(engine, first), Code::ok) << first->text;
        ++passed;
        EXPECT_EQ(negotiated(engine, allreduce(engine, y)), Code::ok);
        return;
      }
      engine.submit(first, false);
      EXPECT_THROW(engine.submit(allreduce(engine, y), false), Error);
      refused = true;
      const uint64_t deadline = now_ns() + kPatienceNs;
      uint64_t warned = 0;
      while ((passed < 2 || ranks.count(Counters::stall_warnings) < warned + 2) && now_ns() < deadline) {
        if (passed < 2) warned = ranks.count(Counters::stall_warnings);
        std::this_thread::sleep_for(milliseconds(5));
      }
      EXPECT_EQ(finish(engine, first), Code::ok) << first->text;
      EXPECT_EQ(negotiated(engine, allreduce(engine, y)), Code::ok);
    });
    const std::string rank = "rank " + std::to_string(refuser), log = testing::internal::GetCapturedStderr();
    const std::string why = " refused it when it was submitted there: one of this name is still in flight on ";
    EXPECT_TRUE(contains(log, "Of those, " + rank + why + rank)) << log;
  }
}

TEST(EpochEnd, SlowRanksAreNoStallIfTheCheckIsOff) {
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
