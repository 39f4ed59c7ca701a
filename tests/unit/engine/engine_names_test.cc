// A name that two threads of a rank use at the same time: no rank can know which calls belong together, so no call of
// it has a result any more until the next barrier, on any rank, and nobody waits.
#include <latch>

#include "labels.h"
#include "unit/ranks.h"

LABEL(on_hosts);

namespace lightcc::test {
namespace {

constexpr int kCalls = 300;

bool names_the_tensor_and_the_remedy(const std::string& text) {
  return text.find("'w'") != text.npos && text.find("give each thread names of its own") != text.npos &&
         text.find("until the next barrier()") != text.npos;
}

bool is_refused(Code code) { return code == Code::mismatch || code == Code::invalid_argument; }

// A call that blocks, of the name that threads share.
struct Outcome {
  Code code;
  float sum;
  std::string text;
};
Outcome shared_call(Engine& engine, float value) {
  std::vector<float> data(3, value);
  auto call = request(engine, Kind::allreduce, "w", {in_place(data)});
  const Code code = outcome(engine, call);
  return {code, data[2], call->text};
}

void expect_refused(Engine& engine, int calls) {
  for (int i = 0; i < calls; ++i) {
    const Outcome call = shared_call(engine, float(i));
    ASSERT_TRUE(is_refused(call.code)) << "call " << i << ": " << call.text;
    ASSERT_TRUE(names_the_tensor_and_the_remedy(call.text)) << call.text;
  }
}

void in_two_threads(const std::function<void()>& body) {
  std::thread other(body);
  body();
  other.join();
}

void expect_right_sums_after_a_barrier(Engine& engine, int ranks) {
  done(engine, request(engine, Kind::barrier, "", {}));
  for (int i = 0; i < kCalls; ++i) {
    const Outcome call = shared_call(engine, float(i));
    ASSERT_EQ(call.code, Code::ok) << call.text;
    ASSERT_EQ(call.sum, float(ranks * i));
  }
}

class EngineNames : public testing::TestWithParam<bool> {};  // does the first call block?
INSTANTIATE_TEST_SUITE_P(Blocking, EngineNames, testing::Bool());

TEST_P(EngineNames, OfTwoThreadsAreRefusedOnAllRanksUntilABarrier) {
  for (int refuser : {0, 1}) {
    Ranks ranks(2);
    std::atomic<bool> refused{false};
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> first(3, 1), second(3, 1);
      if (rank != refuser) {
        while (!refused) std::this_thread::yield();
        // Of the very first it is not yet known here. It may be the call that waits there.
        const Outcome call = shared_call(engine, 1);
        if (call.code == Code::ok) EXPECT_EQ(call.sum, 2);
        else EXPECT_TRUE(names_the_tensor_and_the_remedy(call.text)) << call.text;
      } else {
        std::thread blocked;
        auto in_flight = request(engine, Kind::allreduce, "w", {in_place(first)});
        if (GetParam()) {
          blocked = std::thread([&] { outcome(engine, in_flight); });
        } else {
          engine.submit(in_flight, false);
        }
        std::thread([&] {  // it is in flight as soon as this is refused
          for (bool over = false; !over;) {
            try {
              auto other = request(engine, Kind::allreduce, "w", {in_place(second)});
              engine.submit(other, false);
              // It came first: then the one that blocks is refused.
              over = finish(engine, other) != Code::ok;
            } catch (const Error& error) {
              over = true;
              EXPECT_EQ(error.code(), Code::invalid_argument);
              EXPECT_TRUE(names_the_tensor_and_the_remedy(error.what())) << error.what();
            }
            refused = true;
          }
        }).join();
        refused = true;
        if (blocked.joinable()) blocked.join();
        else finish(engine, in_flight);
      }
      in_two_threads([&] { expect_refused(engine, kCalls); });
      expect_right_sums_after_a_barrier(engine, 2);
    });
  }
}

// Rank 0, the coordinator, has nothing to do and has fallen asleep.
TEST(EngineNamesOfTwoThreads, AreHeardOfByACoordinatorThatSleeps) {
  Ranks ranks(2);
  std::latch refused(1);
  ranks.each([&](Engine& engine, int rank) {
    if (rank == 0) return refused.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // longer than anybody spins
    std::vector<float> first(3, 1), second(3, 1);
    auto one = request(engine, Kind::allreduce, "w", {in_place(first)});
    engine.submit(one, false);
    std::thread([&] {
      EXPECT_THROW(engine.submit(request(engine, Kind::allreduce, "w", {in_place(second)}), false), Error);
    }).join();
    EXPECT_EQ(finish(engine, one), Code::mismatch) << one->text;
    refused.count_down();
  });
}

// As they come: two threads on each rank, until each has its error.
TEST(EngineNamesOfThreads, ThatRaceEndWithAnErrorInEachThread) {
  for (int turn = 0; turn < 20; ++turn) {
    Ranks ranks(2);
    ranks.each([](Engine& engine, int) {
      in_two_threads([&] {
        Code code = Code::ok;
        for (int i = 0; i < 100 * kCalls && code == Code::ok; ++i) {
          const Outcome call = shared_call(engine, float(i));
          code = call.code;
          if (code != Code::ok) {
            EXPECT_TRUE(names_the_tensor_and_the_remedy(call.text)) << call.text;
          }
        }
        EXPECT_TRUE(is_refused(code));
      });
      expect_right_sums_after_a_barrier(engine, 2);
    });
  }
}

}  // namespace
}  // namespace lightcc::test
