#include "engine/run/nccl_launches.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "base/clock.h"
#include "base/error.h"

namespace lightcc {
namespace {

TEST(NcclLaunches, TurnsAreTakenInTheirOrder) {
  NcclLaunches launches;
  EXPECT_FALSE(launches.is_next(0));
  for (const int group : {0, 2, 0}) launches.add_turn(group);
  EXPECT_TRUE(launches.is_next(0));
  EXPECT_FALSE(launches.is_next(2));
  EXPECT_TRUE(launches.has_turn(2));
  EXPECT_FALSE(launches.has_turn(1));
  EXPECT_THROW(launches.end_turn(2), Error);
  launches.end_turn(0);
  EXPECT_TRUE(launches.is_next(2));
  launches.end_turn(2);
  EXPECT_FALSE(launches.has_turn(2));
  launches.end_turn(0);
  EXPECT_THROW(launches.end_turn(0), Error);
}

TEST(NcclLaunches, ATurnIsAskedForOnce) {
  NcclLaunches launches;
  EXPECT_TRUE(launches.ask(3));
  EXPECT_FALSE(launches.ask(3));
  EXPECT_TRUE(launches.ask(4));
  launches.add_turn(3);
  launches.end_turn(3);
  EXPECT_TRUE(launches.ask(3));
}

TEST(NcclLaunches, WhoIsGoneHoldsNobodyUp) {
  NcclLaunches launches;
  EXPECT_TRUE(launches.ask(3));
  for (const int group : {3, 0, 3}) launches.add_turn(group);
  launches.forget(3);
  EXPECT_TRUE(launches.is_next(0));
  EXPECT_FALSE(launches.has_turn(3));
  EXPECT_TRUE(launches.ask(3));
}

TEST(NcclLaunches, TheEndWaitsForCommunicatorsButNotForEver) {
  NcclLaunches launches;
  std::promise<void> ends, never;
  launches.add_ending(ends.get_future());
  launches.add_ending(never.get_future());
  std::thread([&] { ends.set_value(); }).join();
  launches.add_turn(0);
  launches.finish(now_ns() + 1'000'000);
  EXPECT_FALSE(launches.is_next(0));
}

}  // namespace
}  // namespace lightcc
