// The window of bits against a std::set that forgets nothing.
#include "harp_plugin/core/received_numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

constexpr uint64_t kWindow = ReceivedNumbers::kWindow;

// false: had before, or too old to tell.
bool take(ReceivedNumbers& numbers, uint64_t number) {
  if (numbers.contains(number)) return false;
  numbers.insert(number);
  return true;
}

std::vector<Range> ranges_of(const ReceivedNumbers& numbers) {
  AckBody ack;
  numbers.ranges(&ack);
  return {ack.ranges.begin(), ack.ranges.begin() + ack.count};
}

// The plain version.
struct Oracle {
  uint64_t first, next;
  std::set<uint64_t> had{};

  uint64_t floor() const { return next - first > kWindow ? next - kWindow : first; }
  bool insert(uint64_t number) {
    if (number < floor()) return false;
    next = std::max(next, number + 1);
    return had.insert(number).second;
  }
  std::vector<Range> ranges() const {
    std::vector<Range> all;
    for (auto at = had.rbegin(); at != had.rend() && *at >= floor(); ++at) {
      if (!all.empty() && all.back().first == *at + 1) {
        all.back().first = *at;
      } else {
        if (all.size() == kMostRanges) break;
        all.push_back({*at, *at});
      }
    }
    return all;
  }
};

TEST(ReceivedNumbers, NothingIsKnownBeforeTheFirst) {
  const ReceivedNumbers numbers(77);
  EXPECT_EQ(numbers.expected(), 77u);
  EXPECT_FALSE(numbers.any());
  EXPECT_TRUE(ranges_of(numbers).empty());
}

TEST(ReceivedNumbers, NumbersInOrderMoveTheNextOneUp) {
  ReceivedNumbers numbers(5);
  for (uint64_t n = 5; n < 3 * kWindow; ++n) ASSERT_TRUE(take(numbers, n));
  EXPECT_EQ(numbers.expected(), 3 * kWindow);
  EXPECT_EQ(ranges_of(numbers), (std::vector<Range>{{2 * kWindow, 3 * kWindow - 1}}));
  EXPECT_FALSE(take(numbers, 3 * kWindow - 1));
}

TEST(ReceivedNumbers, BelowTheFirstNumberIsNothing) {
  ReceivedNumbers numbers(100);
  EXPECT_FALSE(take(numbers, 99));
  EXPECT_TRUE(take(numbers, 101));
  EXPECT_FALSE(take(numbers, 99));
  EXPECT_TRUE(take(numbers, 100));
  EXPECT_EQ(ranges_of(numbers), (std::vector<Range>{{100, 101}}));
}

TEST(ReceivedNumbers, TheWindowEndsWhereItShould) {
  ReceivedNumbers numbers;
  EXPECT_TRUE(take(numbers, kWindow));  // the window is now 1 .. kWindow
  EXPECT_FALSE(take(numbers, 0)) << "too old to tell";
  EXPECT_TRUE(take(numbers, 1));
  EXPECT_FALSE(take(numbers, 1));
  EXPECT_EQ(ranges_of(numbers), (std::vector<Range>{{kWindow, kWindow}, {1, 1}}));
}

TEST(ReceivedNumbers, SixteenRangesAtMostTheNewestOnes) {
  ReceivedNumbers numbers;
  for (uint64_t n = 0; n < 100; n += 2) take(numbers, n);
  const auto ranges = ranges_of(numbers);
  ASSERT_EQ(ranges.size(), kMostRanges);
  EXPECT_EQ(ranges.front(), (Range{98, 98}));
  EXPECT_EQ(ranges.back(), (Range{68, 68}));
}

TEST(ReceivedNumbers, AsASetWould) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const uint64_t first = seed % 3 == 0 ? (uint64_t(1) << 32) - 10 : seed % 3 == 1 ? 0 : random() >> 2;
    ReceivedNumbers numbers(first);
    Oracle oracle{first, first};
    const uint64_t loss = random() % 5;                     // in eighths
    const uint64_t reach = uint64_t(1) << random() % 15;    // how far back reordering goes
    const uint64_t jump = random() % 2 == 0 ? 0 : uint64_t(1) << random() % 16;
    for (int step = 0; step < 6000; ++step) {
      uint64_t number = oracle.next;
      const uint64_t what = random() % 64;
      if (what < 16 && oracle.next > reach) number = oracle.next - random() % reach - 1;
      if (what >= 16 && random() % 8 < loss) number += random() % 3;
      if (what == 63 && jump != 0) number += random() % jump;
      ASSERT_EQ(take(numbers, number), oracle.insert(number)) << number << " at step " << step;
      ASSERT_EQ(numbers.expected(), oracle.next);
      if (step % 16 != 0) continue;
      ASSERT_EQ(ranges_of(numbers), oracle.ranges()) << "at step " << step;
    }
  }
}

}  // namespace
}  // namespace harp
