// How long a wait spins and yields: what has paid becomes longer, what has not shorter, between bounds.
#include "base/clock.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr uint64_t kShortNs = 1'000, kLongNs = 10'000'000;

TEST(WaitHabit, YieldsForLessLongWhileWaitsAreLong) {
  WaitHabit habit(0);
  const uint64_t most = habit.yield_ns();
  habit.waited(kShortNs);
  EXPECT_EQ(habit.yield_ns(), most);
  habit.waited(kLongNs);
  EXPECT_EQ(habit.yield_ns(), most / 2);
  for (int i = 0; i < 100; ++i) habit.waited(kLongNs);
  const uint64_t least = habit.yield_ns();
  EXPECT_LT(least, most / 10);
  EXPECT_GT(least, 0u);
  habit.waited(kShortNs);
  EXPECT_EQ(habit.yield_ns(), 2 * least);
  for (int i = 0; i < 100; ++i) habit.waited(kShortNs);
  EXPECT_EQ(habit.yield_ns(), most);
}

TEST(WaitHabit, SpinsForLessLongWhereThatDoesNotPay) {
  WaitHabit habit(20'000);
  EXPECT_EQ(habit.spin_ns(), 20'000u);
  EXPECT_FALSE(habit.oversubscribed());
  habit.spinning_paid(false);
  EXPECT_EQ(habit.spin_ns(), 10'000u);
  for (int i = 0; i < 100; ++i) habit.spinning_paid(false);
  EXPECT_GT(habit.spin_ns(), 0u);
  for (int i = 0; i < 100; ++i) habit.spinning_paid(true);
  EXPECT_EQ(habit.spin_ns(), 20'000u);
}

TEST(WaitHabit, NeverSpinsWhereCoresAreFewerThanRanks) {
  WaitHabit habit(0);
  EXPECT_TRUE(habit.oversubscribed());
  for (int i = 0; i < 10; ++i) habit.spinning_paid(true);
  EXPECT_EQ(habit.spin_ns(), 0u);
}

// The network is slow: a patience that lasts long begins short ones.
TEST(SpinPolicy, IsUsedUpSoonerAfterLongWaits) {
  WaitHabit habit(0);
  const auto waited_ns = [&] {
    SpinPolicy patience(habit);
    const uint64_t begin = now_ns();
    while (patience.wait_a_little()) {
    }
    return now_ns() - begin;
  };
  const uint64_t fresh = habit.yield_ns();
  for (int i = 0; i < 20; ++i) {
    SpinPolicy patience(habit);
    while (patience.wait_a_little()) {
    }
    timespec nap{0, 1'000'000};
    nanosleep(&nap, nullptr);
    patience.reset();
  }
  EXPECT_LT(habit.yield_ns(), fresh / 4);
  EXPECT_LT(waited_ns(), 1'000'000'000u);
}

}  // namespace
}  // namespace lightcc
