// Engines under a learned fusion plan: what a set costs, and that leaving a plan in any way loses nothing.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "labels.h"
#include "unit/ranks.h"
#include "unit/simulated.h"

LABEL(on_hosts);

namespace lightcc {
namespace {

using namespace test;

constexpr int kServing = 5;  // steps after which a plan serves

// On a machine so busy that a thread stands still for a third of a second amid a step, a plan may be left and made
// again: tests of how much is planned expect most, and not all.

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kScenarios = 160;
#else
constexpr int kScenarios = 1000;
#endif

// The gradients of an optimizer: tensors in memory that ranks share, side by side, and in private memory.
class Gradients {
 public:
  Gradients(Engine& engine, std::string name, int set, const std::vector<int64_t>& counts, size_t private_ones = 0)
      : engine_(engine), name_(std::move(name)), set_(set), counts_(counts), private_(counts.size()) {
    size_t bytes = 0;
    for (int64_t count : counts) bytes += round_up(size_t(count) * sizeof(float));
    slab_ = engine.arena()->allocate(bytes + kLine);
    std::byte* at = slab_;
    for (size_t i = 0; i < counts.size(); ++i) {
      if (i < private_ones) private_[i].resize(size_t(counts[i]));
      data_.push_back(i < private_ones ? private_[i].data() : reinterpret_cast<float*>(at));
      at += round_up(size_t(counts[i]) * sizeof(float));
    }
  }
  ~Gradients() { engine_.arena()->release(slab_); }

  size_t size() const { return counts_.size(); }
  std::string key(size_t i) const { return name_ + std::to_string(i); }
  RequestPtr make(size_t i, float value) {
    std::fill_n(data_[i], counts_[i], value);
    auto made = request(engine_, Kind::allreduce, key(i), {in_place(data_[i], counts_[i])});
    made->set = set_;
    return made;
  }
  RequestPtr submit(size_t i, float value) {
    auto made = make(i, value);
    engine_.submit(made, false);
    return made;
  }
  void expect(size_t i, float value) const {
    const bool all = std::all_of(data_[i], data_[i] + counts_[i], [&](float x) { return x == value; });
    EXPECT_TRUE(all) << key(i) << " on rank " << engine_.world().rank << " has " << data_[i][0] << ", not " << value;
  }

 private:
  Engine& engine_;
  const std::string name_;
  const int set_;
  const std::vector<int64_t> counts_;
  std::vector<std::vector<float>> private_;
  std::byte* slab_;
  std::vector<float*> data_;
};

float sum_of(int ranks, int step) { return float(ranks * (ranks + 1) / 2 + ranks * step); }

void expect_end(Engine& engine, const std::vector<RequestPtr>& requests, Code code = Code::ok) {
  for (auto it = requests.rbegin(); it != requests.rend(); ++it)
    EXPECT_EQ(finish(engine, *it), code) << (*it)->title() << ": " << (*it)->text;
}

// One step; the ranks submit in this order.
void step(Engine& engine, Gradients& gradients, int ranks, int number, std::vector<size_t> order = {}) {
  if (order.empty())
    for (size_t i = 0; i < gradients.size(); ++i) order.push_back(i);
  std::vector<RequestPtr> sent;
  for (size_t i : order) sent.push_back(gradients.submit(i, float(engine.world().rank + 1 + number)));
  expect_end(engine, sent);
  for (size_t i : order) gradients.expect(i, sum_of(ranks, number));
}

uint64_t planned(Engine& engine) { return engine.counters().values[Counters::planned]; }
uint64_t batches(Engine& engine) { return engine.counters().values[Counters::batches]; }

TEST(EnginePlan, FromTheFourthStepOnASetIsOneBatch) {
  for (int n = 1; n <= 4; ++n) {
    Ranks ranks(n);
    ranks.each([&](Engine& engine, int) {
      Gradients gradients(engine, "w", 1, std::vector<int64_t>(40, 16));
      for (int i = 0; i < 3; ++i) step(engine, gradients, n, i);
      EXPECT_EQ(planned(engine), 0u);
      int in_one_batch = 0;
      for (int i = 3; i < 23; ++i) {
        const uint64_t before = batches(engine);
        step(engine, gradients, n, i);
        in_one_batch += batches(engine) == before + 1;
      }
      EXPECT_GE(in_one_batch, 12);
      EXPECT_GE(planned(engine), 12u * 40);
      EXPECT_NE(engine.plans_text().find("bucket 0: 40 tensors"), std::string::npos);
    });
  }
}

TEST(EnginePlan, WithoutASetOrFusionThereIsNone) {
  for (const bool fusion : {true, false}) {
    Config config;
    config.fusion = fusion;
    Ranks ranks(2, config);
    ranks.each([&](Engine& engine, int) {
      Gradients gradients(engine, "w", fusion ? 0 : 1, {4, 4, 4});
      for (int i = 0; i < 8; ++i) step(engine, gradients, 2, i);
      EXPECT_EQ(planned(engine), 0u);
    });
  }
}

TEST(EnginePlan, EachSetHasItsOwn) {
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int) {
    const int pair = add_group(engine, {0, 1});
    EXPECT_EQ(pair, 1);
    Gradients a(engine, "a", 1, {4, 100, 7}), b(engine, "b", 2, {9, 9});
    for (int i = 0; i < 28; ++i) {
      step(engine, a, 2, i);
      if (i % 2) step(engine, b, 2, i);  // an optimizer that steps less often
    }
    EXPECT_GE(planned(engine), 15u * 3 + 6u * 2);  // of 25 and 11 steps
  });
}

// A program whose callbacks wait for all of a set, where one request does not come: nobody waits for those that are
// held, and they go nevertheless.
TEST(EnginePlan, WhatIsHeldForARequestThatDoesNotComeGoes) {
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int rank) {
    Gradients gradients(engine, "w", 1, {4, 4, 4, 4});
    for (int i = 0; i < kServing; ++i) step(engine, gradients, 2, i);
    std::atomic<int> done{0};
    std::vector<RequestPtr> sent;
    for (size_t i : {0, 1, 3}) {
      auto one = gradients.make(i, float(rank));
      one->callbacks.context = &done;
      one->callbacks.done = [](void* context, int, const char*) { ++*static_cast<std::atomic<int>*>(context); };
      engine.submit(one, false);
      sent.push_back(one);
    }
    for (uint64_t end = now_ns() + kPatienceNs; done < 3 && now_ns() < end;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(done, 3);
    expect_end(engine, sent);
    gradients.expect(3, 1);
    for (int i = 0; i < 8; ++i) step(engine, gradients, 2, i);
  });
}

// The engine thread sleeps, as all that is in flight is held. What comes in a burst is left to it, and must wake it: at
// its next look of its own accord 100 ms would have gone by.
TEST(EnginePlan, TheLastOfABurstWakesTheEngineThread) {
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int) {
    Gradients gradients(engine, "w", 1, {4, 4, 4});
    for (int i = 0; i < kServing; ++i) step(engine, gradients, 2, i);
    std::vector<uint64_t> took;
    for (int round = 0; round < 15; ++round) {
      std::atomic<int> done{0};
      std::vector<RequestPtr> requests;
      for (size_t i = 0; i < 3; ++i) {
        auto& one = requests.emplace_back(gradients.make(i, 1));
        one->callbacks.context = &done;
        one->callbacks.done = [](void* context, int, const char*) { ++*static_cast<std::atomic<int>*>(context); };
      }
      engine.submit(requests[0], false);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const uint64_t begin = now_ns();
      engine.submit(requests[1], false), engine.submit(requests[2], false);
      while (done < 3 && now_ns() < begin + kPatienceNs) std::this_thread::sleep_for(std::chrono::microseconds(50));
      took.push_back(now_ns() - begin);
      expect_end(engine, requests);
    }
    std::ranges::nth_element(took, took.begin() + 3);  // a busy machine makes most of them slow
    EXPECT_LT(took[3], 60'000'000u);
  });
}

TEST(EnginePlan, APeerThatLeavesEndsWhatIsHeld) {
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int rank) {
    Gradients gradients(engine, "w", 1, {4, 4, 4});
    for (int i = 0; i < kServing; ++i) step(engine, gradients, 2, i);
    if (rank == 1) return engine.shutdown();
    std::vector<RequestPtr> sent;
    for (size_t i = 0; i < 2; ++i) try {
        sent.push_back(gradients.submit(i, 1));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Code::shut_down);
      }
    expect_end(engine, sent, Code::shut_down);
  });
}

TEST(EnginePlan, ManyStepsUseNoMoreMemory) {
  const int steps = kWatched ? 1'000 : 10'000;
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int) {
    Gradients gradients(engine, "w", 1, {4, 4, 4}, 1);
    for (int i = 0; i < steps; ++i) step(engine, gradients, 2, i % 100);
    EXPECT_GE(planned(engine), 3u * size_t(steps / 10 * 9));
  });
}

// ---- breaks, at random

enum class Break { order, skipped, extra, waits, dtype, mismatch, join, two_at_once, kCount };

struct Scenario {
  std::mt19937_64 random;  // the same on all ranks
  int id, ranks;
  std::vector<int64_t> counts;
  size_t private_ones;

  Scenario(uint64_t seed, int number, int n) : random(seed + uint64_t(number)), id(number), ranks(n) {
    counts.resize(1 + random() % 7);
    for (int64_t& count : counts) count = 1 + int64_t(random() % (random() % 4 ? 300 : 20'000));
    private_ones = random() % 3 ? 0 : random() % (counts.size() + 1);
  }

  void run(Engine& engine, int rank) {
    const std::string name = "s" + std::to_string(id) + ".";
    Gradients gradients(engine, name, id, counts, private_ones), extra(engine, name + "extra", id, {50});
    const int steps = 6 + int(random() % 5);
    for (int i = 0; i < steps; ++i) {
      if (i < 3 || random() % 3) {
        step(engine, gradients, ranks, i);
        continue;
      }
      const auto broken = Break(random() % uint64_t(Break::kCount));
      const size_t one = random() % counts.size(), other = random() % counts.size();
      const int odd = int(random() % uint64_t(ranks));
      break_step(engine, gradients, extra, rank, i, broken, one, other, odd);
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "scenario " << id << ", " << ranks << " ranks, step " << i << ", break " << int(broken);
        return;
      }
    }
  }

  void break_step(Engine& engine, Gradients& gradients, Gradients& extra, int rank, int number, Break broken,
                  size_t one, size_t other, int odd) {
    const float value = float(rank + 1 + number);
    std::vector<size_t> order(counts.size());
    std::iota(order.begin(), order.end(), 0);
    std::mt19937_64 own(random() + uint64_t(rank));
    std::vector<RequestPtr> sent;
    switch (broken) {
      case Break::order:
        std::shuffle(order.begin(), order.end(), own);
        return step(engine, gradients, ranks, number, order);
      case Break::skipped:
        order.erase(order.begin() + ptrdiff_t(one));
        return order.empty() ? void() : step(engine, gradients, ranks, number, order);
      case Break::extra:
        sent = {extra.submit(0, value)};
        step(engine, gradients, ranks, number);
        expect_end(engine, sent);
        return extra.expect(0, sum_of(ranks, number));
      case Break::waits:  // one rank waits for one before it goes on
        for (size_t i = 0; i < counts.size(); ++i) {
          sent.push_back(gradients.submit(i, value));
          if (rank == odd && i == one) expect_end(engine, {sent[std::min(one, other)]});
        }
        expect_end(engine, sent);
        break;
      case Break::dtype:
        for (size_t i = 0; i < counts.size(); ++i) {
          auto made = gradients.make(i, value);
          if (i == one) made->what.op = ReduceOp::max;
          engine.submit(made, false);
          sent.push_back(made);
        }
        expect_end(engine, sent);
        order.erase(order.begin() + ptrdiff_t(one));
        gradients.expect(one, float(ranks + number));
        break;
      case Break::mismatch:
        for (size_t i = 0; i < counts.size(); ++i) {
          auto made = gradients.make(i, value);
          if (i == one && rank == odd) made->what.op = ReduceOp::max;
          engine.submit(made, false);
          sent.push_back(made);
        }
        for (size_t i = 0; i < counts.size(); ++i)
          expect_end(engine, {sent[i]}, i == one && ranks > 1 ? Code::mismatch : Code::ok);
        order.erase(order.begin() + ptrdiff_t(one));
        break;
      case Break::join: {
        if (rank != odd)
          for (size_t i = 0; i < counts.size(); ++i) sent.push_back(gradients.submit(i, value));
        expect_end(engine, sent);
        if (rank != odd)
          for (size_t i = 0; i < counts.size(); ++i)
            gradients.expect(i, sum_of(ranks, number) - float(odd + 1 + number));
        auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
        engine.submit(join, false);
        return expect_end(engine, {join});
      }
      default:  // the next step begins where the first is not waited for yet
        for (size_t i = 0; i < counts.size(); ++i) {
          sent.push_back(gradients.submit(i, value));
          if (i == one) expect_end(engine, {sent[0]}), sent[0] = gradients.submit(0, value);
        }
        expect_end(engine, sent);
    }
    for (size_t i : order) gradients.expect(i, sum_of(ranks, number));
  }
};

TEST(EnginePlan, WhateverBreaksAPlanNothingIsLost) {
  const uint64_t seed = run_seed();
  for (int n = 1; n <= 4; ++n) {
    Config config;
    config.cache_capacity = 64;  // which the plans of sets that do not come again must not use up
    Ranks ranks(n, config);
    ranks.each([&](Engine& engine, int rank) {
      for (int i = 0; i < kScenarios / 4 && !testing::Test::HasFailure(); ++i) {
        Scenario scenario(seed, n * 10'000 + i, n);
        scenario.run(engine, rank);
      }
    });
    EXPECT_GT(ranks.count(Counters::planned), uint64_t(kScenarios / 4 * n)) << n << " ranks";
  }
}

}  // namespace
}  // namespace lightcc
