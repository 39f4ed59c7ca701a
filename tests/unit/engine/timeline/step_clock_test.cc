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

TEST(StepClock, TwoOptimizersMakeOneStep) {
  EXPECT_EQ(steps_of({{"g", 1}, {"d", 2}, {"g", 1}, {"d", 2}, {"g", 1}}), "g.g.g");
}

TEST(StepClock, WhatIsNotReducedAnyMoreGivesWay) {
  EXPECT_EQ(steps_of({{"a", 1}, {"b", 1}, {"a", 1}, {"x", 2}, {"y", 2}, {"x", 2}, {"y", 2}, {"x", 2}}), "a.a..x.x");
  EXPECT_EQ(steps_of({{"metric", 0}, {"x", 0}, {"y", 0}, {"x", 0}, {"y", 0}}), "metric..x.");
}

}  // namespace
}  // namespace lightcc
