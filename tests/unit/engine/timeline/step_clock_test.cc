// When a step begins, by the names of what is reduced.
#include "engine/timeline/step_clock.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace lightcc {
namespace {

// Of each name, with its set, whether it begins a step: "a" begins one, "." does not.
std::string steps_of(const std::vector<std::pair<std::string, int>>& requests) {
  StepClock clock;
  std::string line;
  for (const auto& [name, set] : requests) line += clock.begins(name, set) ? name : ".";
  return line;
}

TEST(StepClock, AStepBeginsWithTheSameTensor) {
  EXPECT_EQ(steps_of({{"a", 1}, {"b", 1}, {"c", 1}, {"a", 1}, {"c", 1}, {"b", 1}, {"a", 1}}), "a..a..a");
  EXPECT_EQ(steps_of({{"a", 0}, {"a", 0}}), "aa");
}

TEST(StepClock, TensorsOfASetComeBeforeOthers) {
  EXPECT_EQ(steps_of({{"loss", 0}, {"a", 1}, {"b", 1}, {"loss", 0}, {"loss", 0}, {"a", 1}}), "lossa...a");
}

TEST(StepClock, AfterAWhileTensorsOfNoSetComeInPlaceOfAModelThatIsTrainedNoMore) {
  StepClock clock;
  for (int step = 0; step < 3; ++step) EXPECT_TRUE(clock.begins("a", 1));
  for (int step = 1; step < StepClock::kGivesWay; ++step) {
    EXPECT_FALSE(clock.begins("x", 0)) << step;
    EXPECT_FALSE(clock.begins("y", 0)) << step;
  }
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(clock.begins("x", 0));
    EXPECT_FALSE(clock.begins("y", 0));
  }
  EXPECT_TRUE(clock.begins("a", 1)) << "a set comes before others again";
}

TEST(StepClock, WhatComesOnceIsNotFollowedForEver) {
  StepClock clock;
  EXPECT_TRUE(clock.begins("a", 1));
  EXPECT_FALSE(clock.begins("once", 1));
  int steps = 0;
  for (int i = 0; i < 2 * StepClock::kMostTensors; ++i) steps += clock.begins(i % 2 ? "x" : "y", 1);
  EXPECT_GT(steps, StepClock::kMostTensors / 4);
}

TEST(StepClock, TwoOptimizersMakeOneStep) {
  EXPECT_EQ(steps_of({{"g", 1}, {"d", 2}, {"g", 1}, {"d", 2}, {"g", 1}}), "g.g.g");
}

TEST(StepClock, WhatIsNotReducedAnyMoreGivesWay) {
  EXPECT_EQ(steps_of({{"a", 1}, {"b", 1}, {"a", 1}, {"x", 2}, {"y", 2}, {"x", 2}, {"y", 2}, {"x", 2}}), "a.a..x.x");
  EXPECT_EQ(steps_of({{"metric", 0}, {"x", 0}, {"y", 0}, {"x", 0}, {"y", 0}}), "metric..x.");
}

}  // namespace
}  // namespace lightcc
