#include "engine/negotiate/control/hold.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc::hold {
namespace {

TEST(Hold, ForTheNextStepInABurstOfSmallSubmissions) {
  EXPECT_TRUE(for_next_step(0, 0));
  EXPECT_TRUE(for_next_step(kBurstNs - 1, kBurstBytes - 1));
  EXPECT_FALSE(for_next_step(kBurstNs, 0)) << "the last step was long ago";
  EXPECT_FALSE(for_next_step(0, kBurstBytes)) << "large enough for a step of its own";
}

TEST(Hold, ForTheNextBatchWhileOneRuns) {
  EXPECT_FALSE(for_next_batch(0, 1, 1)) << "nothing in flight";
  EXPECT_TRUE(for_next_batch(1, 1, kAgreedAheadBytes - 1));
  EXPECT_TRUE(for_next_batch(1, 2, kAgreedAheadBytes - 1));
  EXPECT_FALSE(for_next_batch(1, 1, kAgreedAheadBytes)) << "enough to be agreed on ahead of time";
  EXPECT_TRUE(for_next_batch(2, 1, INT64_MAX)) << "one batch ahead is enough";
  EXPECT_FALSE(for_next_batch(2, 2, kAgreedAheadBytes)) << "both run";
  EXPECT_TRUE(for_next_batch(3, 2, INT64_MAX));
}

TEST(Hold, ABucketIsStuckAfterFourTimesWhatItTookOfLate) {
  constexpr uint64_t kUsual = 100'000'000;
  EXPECT_FALSE(is_bucket_stuck(kBucketNs + 4 * kUsual, kUsual));
  EXPECT_TRUE(is_bucket_stuck(kBucketNs + 4 * kUsual + 1, kUsual));
  EXPECT_FALSE(is_bucket_stuck(kBucketNs + 4 * kFirstUsualNs, 0)) << "it was never whole";
  EXPECT_TRUE(is_bucket_stuck(kBucketNs + 4 * kFirstUsualNs + 1, 0));
}

TEST(Hold, ACallOnTheFastPathIsRefusedByOneThatDoesSomethingElse) {
  for (const bool runs_batch : {false, true})
    for (const bool between_hosts : {false, true}) EXPECT_EQ(refusal_ns(true, runs_batch, between_hosts), 0u);
  EXPECT_EQ(refusal_ns(false, true, true), kBusyNs);
  EXPECT_EQ(refusal_ns(false, true, false), kBusyNs);
  EXPECT_EQ(refusal_ns(false, false, false), kBusyNs);
  EXPECT_EQ(refusal_ns(false, false, true), kIdleBetweenHostsNs) << "it may only be late";
}

}  // namespace
}  // namespace lightcc::hold
