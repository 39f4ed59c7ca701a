// The learned fusion plan: what a step is, and which buckets are made of it.
#include "engine/negotiate/control/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>

#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr FusionLimits kLimits{128 << 20, true};
constexpr PlanCosts kCosts{50e-6, 1e-9};
constexpr double kOverheadS = 50e-6;  // as plan.cc has it

PlanRequest gradient(int64_t bytes, double ready_s, uintptr_t address = 0, DType dtype = DType::float32) {
  return {{Kind::allreduce, ReduceOp::sum, 1, 1, {}, dtype, bytes, address, {}}, ready_s};
}

// When the last bucket ends, if each begins once it is ready and the one before is through.
double end_of(const std::vector<PlanRequest>& requests, const std::vector<Bucket>& buckets, PlanCosts costs) {
  double end = 0;
  for (const Bucket& bucket : buckets) {
    double ready = 0;
    int64_t bytes = 0;
    for (size_t i : bucket) ready = std::max(ready, requests[i].ready_s), bytes += requests[i].request.bytes;
    end = std::max(end, ready) + costs.start_s + costs.byte_s * double(bytes);
  }
  return end;
}

// Every letter a request that becomes ready a microsecond after the one before; "|" where a plan is due.
std::string seen(StepRecord& record, const std::string& letters) {
  static uint64_t now = 0;
  std::string text;
  for (char letter : letters) {
    text += letter;
    if (record.ready(std::string(1, letter), now += 1000)) text += "|";
  }
  return text;
}

std::string keys(const StepRecord& record) {
  std::string text;
  for (auto& item : record.step()) text += item.key;
  return text;
}

// ---- steps

TEST(StepRecord, ThreeEqualStepsAreEnough) {
  StepRecord record;
  EXPECT_EQ(seen(record, "abcabcabc"), "abcabcabc|");
  EXPECT_EQ(keys(record), "abc");
}

TEST(StepRecord, TheOrderMayDiffer) {
  StepRecord record;
  EXPECT_EQ(seen(record, "abc" "acb" "bca"), "abcacbbca|");
  EXPECT_EQ(keys(record), "bca");
}

TEST(StepRecord, AStepThatLacksSomethingIsNotEqual) {
  StepRecord record;
  EXPECT_EQ(seen(record, "abc" "ab" "abc" "abc" "abc"), "abcababcabcabc|");
  EXPECT_EQ(keys(record), "abc");
}

TEST(StepRecord, WhatComesBehindTheStepsBeforeBelongsToTheStep) {
  StepRecord record;
  EXPECT_EQ(seen(record, "ab" "abc" "abc" "abc"), "ababcabcabc|");
  EXPECT_EQ(keys(record), "abc");
  EXPECT_EQ(seen(record, "acb" "acbd"), "acb|acb|d");
}

TEST(StepRecord, WhatIsNotSeenForThreeStepsIsForgotten) {
  StepRecord record;
  EXPECT_EQ(seen(record, "abc" "ab" "ab" "ab" "ab" "ab"), "abcabababab|ab|");
}

TEST(StepRecord, BeginsAnewBehindTheStepInWhichAPlanEnded) {
  StepRecord record;
  seen(record, "abcabcabc");
  record.start_over(kServedSteps, {"b", "c"});
  EXPECT_EQ(seen(record, "cb" "abcabcabc"), "cbabcabcabc|");
  EXPECT_EQ(keys(record), "abc");
  record.start_over(kServedSteps, {"c"});  // which does not come
  EXPECT_EQ(seen(record, "abcabcabc"), "abcabcabc|");
  EXPECT_EQ(keys(record), "abc");
}

TEST(StepRecord, PlansThatDoNotServeAreMadeLessOften) {
  StepRecord record;
  for (int steps : {3, 6, 12}) {
    std::string text, expected;
    for (int i = 0; i < steps; ++i) text += seen(record, "ab"), expected += "ab";
    EXPECT_EQ(text, expected + "|");
    record.start_over(kServedSteps - 1);
  }
  record.start_over(kServedSteps);
  EXPECT_EQ(seen(record, "ababab"), "ababab|");
}

TEST(StepRecord, RealignsAtTheLongestPause) {
  StepRecord record;
  uint64_t now = 0;
  const auto step = [&](const std::string& letters, uint64_t pause) {
    bool due = false;
    for (char letter : letters) due = record.ready(std::string(1, letter), now += letter == letters[0] ? pause : 1);
    return due;
  };
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step("abc", 100), i == 2);
  bool due = false;
  for (int i = 0; i < 4; ++i) {  // n comes first from now on, and is taken for the end of the step before
    record.ready("n", now += 100);
    due = due || step("abc", 1);
  }
  record.ready("n", now += 100);
  EXPECT_EQ(keys(record), "abcn");
  record.realign();
  step("abc", 1);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(step("nabc", 100), i == 2);
  EXPECT_EQ(keys(record), "nabc");
}

// ---- buckets

TEST(Plan, SmallOnesAreOneBucket) {
  std::vector<PlanRequest> requests;
  for (int i = 0; i < 161; ++i) requests.push_back(gradient(64, i * 10e-6));
  const auto buckets = plan_buckets(requests, kCosts, kLimits);
  ASSERT_EQ(buckets.size(), 1u);
  EXPECT_EQ(buckets[0].size(), 161u);
}

TEST(Plan, WhatWaitsForNothingTravelsEarlyAndTheLastBucketIsSmall) {
  std::vector<PlanRequest> requests;
  for (uintptr_t i = 0; i < 10; ++i)
    requests.push_back(gradient(4 << 20, double(i) * 10e-3, (i + 1) << 22));  // side by side
  requests.push_back(gradient(64, 100e-3, uintptr_t(11) << 22));
  const auto buckets = plan_buckets(requests, kCosts, kLimits);
  ASSERT_GT(buckets.size(), 2u);
  EXPECT_EQ(buckets.back(), (Bucket{10}));
  EXPECT_NEAR(end_of(requests, buckets, kCosts), 100e-3 + 50e-6, 1e-6);
}

TEST(Plan, IsTheOptimum) {
  std::mt19937_64 random(test::run_seed());
  for (int run = 0; run < 200; ++run) {
    const size_t n = 1 + random() % 9;
    std::vector<PlanRequest> requests;
    for (size_t i = 0; i < n; ++i) {
      const double ready = double(random() % 1000) * 1e-6;
      requests.push_back(gradient(int64_t(random() % 500'000), ready, 64 << 20 | i << 20));
    }
    const PlanCosts costs{double(random() % 100) * 1e-6, double(random() % 100) * 1e-11};
    const auto price = [&](const std::vector<Bucket>& buckets) {
      return end_of(requests, buckets, costs) + double(buckets.size()) * kOverheadS;
    };
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, {}, [&](size_t i) { return requests[i].ready_s; });
    double least = std::numeric_limits<double>::infinity();
    for (size_t cuts = 0; cuts < size_t(1) << (n - 1); ++cuts) {
      std::vector<Bucket> buckets(1);
      for (size_t i = 0; i < n; ++i) {
        buckets.back().push_back(order[i]);
        if (i + 1 < n && cuts >> i & 1) buckets.emplace_back();
      }
      least = std::min(least, price(buckets));
    }
    // Beside it, that tensors which do not lie side by side are copied: 0.2 ns a byte.
    EXPECT_LE(price(plan_buckets(requests, costs, kLimits)), least + 2e-10 * 500'000 * double(n)) << "run " << run;
  }
}

TEST(Plan, BucketsKeepTheLimit) {
  std::vector<PlanRequest> requests;
  for (int i = 0; i < 100; ++i) requests.push_back(gradient(1000, i * 1e-6));
  for (int64_t limit : {1, 999, 1000, 3500, 30'000, 1'000'000}) {
    size_t count = 0;
    for (const Bucket& bucket : plan_buckets(requests, kCosts, {limit, true})) {
      EXPECT_LE(int64_t(bucket.size()) * 1000, std::max<int64_t>(limit, 1000));
      count += bucket.size();
    }
    EXPECT_EQ(count, 100u) << limit;
  }
}

TEST(Plan, EachRequestIsInOneBucketWithSuchAsItMayTravelWith) {
  std::vector<PlanRequest> requests;
  for (int i = 0; i < 3000; ++i)
    requests.push_back(gradient(i % 7 * 100, i % 50 * 1e-6, i % 3 ? 0 : 4096 + uintptr_t(i) * 1024,
                                i % 5 ? DType::float32 : DType::float64));
  std::vector<int> times(requests.size());
  for (const Bucket& bucket : plan_buckets(requests, kCosts, kLimits))
    for (size_t i : bucket) {
      ++times[i];
      EXPECT_TRUE(may_fuse(requests[bucket[0]].request, requests[i].request));
    }
  EXPECT_EQ(times, std::vector<int>(requests.size(), 1));
}

TEST(Plan, LargePrivateOnesTravelAloneAndSmallOnesPastThem) {
  std::vector<PlanRequest> requests;
  for (int i = 0; i < 9; ++i) requests.push_back(gradient(i % 3 ? 1000 : kMostCopiedBytes + 1, i * 1e-6));
  const auto buckets = plan_buckets(requests, kCosts, kLimits);
  ASSERT_EQ(buckets.size(), 4u);
  EXPECT_EQ(buckets.back(), (Bucket{1, 2, 4, 5, 7, 8}));
}

TEST(Plan, NeighboursInMemoryStandSideBySide) {
  const std::vector<PlanRequest> requests{gradient(64, 1e-6, 4096 + 128), gradient(64, 2e-6, 4096),
                                          gradient(64, 3e-6, 4096 + 64)};
  EXPECT_EQ(plan_buckets(requests, kCosts, kLimits), (std::vector<Bucket>{{1, 2, 0}}));
}

TEST(MeasuredCosts, AreThoseOfTheQuickerCollectives) {
  MeasuredCosts costs({1, 1});
  EXPECT_EQ(costs.costs().start_s, 1);
  for (int i = 0; i < 9; ++i) costs.note(1000, i < 3 ? 1e-4 : 1.0), costs.note(1 << 20, i < 3 ? 1e-3 : 1.0);
  EXPECT_DOUBLE_EQ(costs.costs().start_s, 1e-4);
  EXPECT_DOUBLE_EQ(costs.costs().byte_s, 1e-3 / (1 << 20));
}

}  // namespace
}  // namespace lightcc
