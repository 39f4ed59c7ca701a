// The names of a rank's requests in flight, by script: at this time that happens, expect exactly this.
#include "engine/request/names.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr uint64_t kBegin = 5'000'000'000, kHold = Names::kHoldNs;
constexpr bool kHandle = true, kNoHandle = false;

TEST(Names, OfARequestThatIsNotDoneIsTakenHoweverLongItTakes) {
  for (bool handle : {kHandle, kNoHandle}) {
    Names names;
    EXPECT_TRUE(names.claim("x", handle, kBegin));
    EXPECT_TRUE(names.claim("y", handle, kBegin));
    EXPECT_FALSE(names.claim("x", handle, kBegin));
    EXPECT_FALSE(names.claim("x", !handle, kBegin + 100 * kHold));
    EXPECT_TRUE(names.is_taken("x", kBegin + 100 * kHold));
    EXPECT_FALSE(names.is_taken("z", kBegin));
  }
}

TEST(Names, KnowWhetherAnotherThreadHasTakenThem) {
  const std::thread::id here = std::this_thread::get_id(), elsewhere;
  Names names;
  EXPECT_FALSE(names.is_of_another_thread("x", here));
  names.claim("x", kHandle, kBegin, here);
  EXPECT_FALSE(names.is_of_another_thread("x", here));
  EXPECT_TRUE(names.is_of_another_thread("x", elsewhere));
  EXPECT_FALSE(names.claim("x", kHandle, kBegin, elsewhere));
  EXPECT_TRUE(names.is_of_another_thread("x", elsewhere)) << "a refusal changes nothing";
}

TEST(Names, WithoutAHandleIsFreeWhenItsRequestIsDone) {
  Names names;
  names.claim("x", kNoHandle, kBegin);
  EXPECT_FALSE(names.finished("x", kBegin + 1));
  EXPECT_FALSE(names.any_held());
  EXPECT_TRUE(names.claim("x", kNoHandle, kBegin + 1));
}

// The second of two that are submitted at once is refused, whether or not the first is done by then.
TEST(Names, WithAHandleIsTakenForAMillisecondEvenIfItsRequestIsDoneAtOnce) {
  for (uint64_t done_after : {uint64_t(1), kHold / 2, kHold - 1}) {
    Names names;
    names.claim("x", kHandle, kBegin);
    EXPECT_TRUE(names.finished("x", kBegin + done_after));
    EXPECT_FALSE(names.claim("x", kHandle, kBegin + done_after));
    EXPECT_TRUE(names.is_taken("x", kBegin + kHold - 1));
    EXPECT_FALSE(names.claim("x", kNoHandle, kBegin + kHold - 1));
    EXPECT_FALSE(names.is_taken("x", kBegin + kHold));
    EXPECT_TRUE(names.claim("x", kHandle, kBegin + kHold));
  }
}

TEST(Names, WithAHandleIsFreeAtOnceIfItsRequestTookAMillisecond) {
  Names names;
  names.claim("x", kHandle, kBegin);
  EXPECT_FALSE(names.finished("x", kBegin + kHold));
  EXPECT_TRUE(names.claim("x", kHandle, kBegin + kHold));
}

TEST(Names, OfAHandleThatIsGivenBackIsFree) {
  Names names;
  names.claim("x", kHandle, kBegin);
  names.finished("x", kBegin + 1);
  names.give_back("x", kBegin);
  EXPECT_TRUE(names.claim("x", kHandle, kBegin + 2));
  names.give_back("x", kBegin);  // a second time, too late: it is another's now
  EXPECT_FALSE(names.claim("x", kHandle, kBegin + 3));
  EXPECT_TRUE(names.finished("x", kBegin + 4));
  names.give_back("x", kBegin);
  EXPECT_FALSE(names.claim("x", kHandle, kBegin + 2 + kHold - 1))
      << "the first one's time is over, the second's is not";
  EXPECT_TRUE(names.claim("x", kHandle, kBegin + 2 + kHold));
}

TEST(Names, OfAHandleThatIsGivenUpIsFreeWhenItsRequestIsDone) {
  Names names;
  names.claim("x", kHandle, kBegin);
  names.give_back("x", kBegin);
  EXPECT_FALSE(names.claim("x", kHandle, kBegin + 1));
  EXPECT_FALSE(names.finished("x", kBegin + 2));
  EXPECT_TRUE(names.claim("x", kHandle, kBegin + 2));
}

// Programs that never look at their handles: nothing is kept of them.
TEST(Names, OfHandlesThatAreDroppedAreForgotten) {
  Names names;
  for (uint64_t i = 0; i < 10; ++i) {
    const std::string name = std::to_string(i);
    names.claim(name, kHandle, kBegin + i);
    EXPECT_TRUE(names.finished(name, kBegin + 2 * i));
  }
  EXPECT_TRUE(names.any_held());
  EXPECT_FALSE(names.is_taken("another", kBegin + 9 + kHold));
  EXPECT_FALSE(names.any_held());
  EXPECT_FALSE(names.finished("3", kBegin + 9 + kHold)) << "unknown";
}

}  // namespace
}  // namespace lightcc
