// Which of ours belongs to which of theirs.
#include "engine/run/tag_matching.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Matching = TagMatching<int, char>;

TEST(TagMatching, TheNthOfOursBelongsToTheNthOfTheirsUnderItsTag) {
  Matching matching;
  EXPECT_EQ(matching.add_ours({0, 1}, 10), std::nullopt);
  EXPECT_EQ(matching.add_ours({0, 1}, 11), std::nullopt);
  EXPECT_EQ(matching.add_ours({0, 2}, 20), std::nullopt);
  EXPECT_EQ(matching.add_theirs({0, 2}, 'a'), 20);
  EXPECT_EQ(matching.add_theirs({0, 1}, 'b'), 10);
  EXPECT_EQ(matching.add_theirs({0, 1}, 'c'), 11);
  EXPECT_EQ(matching.add_theirs({0, 1}, 'd'), std::nullopt) << "all of ours are taken";
  EXPECT_EQ(matching.add_theirs({0, 1}, 'e'), std::nullopt);
  EXPECT_EQ(matching.add_ours({0, 1}, 12), 'd');
  EXPECT_EQ(matching.add_ours({0, 1}, 13), 'e');
  EXPECT_EQ(matching.add_ours({0, 1}, 14), std::nullopt);
}

TEST(TagMatching, WhatWaitsCanBeTakenOrForgotten) {
  Matching matching;
  EXPECT_EQ(matching.take_ours({0, -1}), std::nullopt);
  matching.add_ours({0, -1}, 1);
  matching.add_ours({0, -1}, 2);
  EXPECT_EQ(matching.take_ours({0, -1}), 1);
  EXPECT_EQ(matching.add_theirs({0, -1}, 'a'), 2);
  matching.add_ours({0, -1}, 3);
  matching.clear();
  EXPECT_EQ(matching.add_theirs({0, -1}, 'b'), std::nullopt);
}

TEST(TagMatching, SpacesDoNotMeet) {
  Matching matching;
  matching.add_ours({0, 5}, 1);
  matching.add_ours({1, 5}, 2);
  EXPECT_EQ(matching.add_theirs({2, 5}, 'a'), std::nullopt);
  EXPECT_EQ(matching.add_theirs({1, 5}, 'b'), 2);
  EXPECT_EQ(matching.add_theirs({0, 5}, 'c'), 1);
}

// However the two sides' words interleave at each of them.
TEST(TagMatching, BothSidesComeToTheSamePairs) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    std::mt19937 random(seed);
    std::vector<int> sends, receives;  // tags, in order
    for (int i = 0; i < 30; ++i) (random() % 2 ? sends : receives).push_back(int(random() % 3));
    const auto pairs = [&](bool at_sender) {
      TagMatching<int, int> matching;  // numbers of sends and receives, whichever side's they are
      std::vector<int> receive_of(sends.size(), -1);
      for (size_t s = 0, r = 0; s < sends.size() || r < receives.size();) {
        const bool is_send = r == receives.size() || (s < sends.size() && random() % 2);
        const MessageTag tag{0, is_send ? sends[s] : receives[r]};
        const int number = int(is_send ? s++ : r++);
        const auto other = is_send == at_sender ? matching.add_ours(tag, number) : matching.add_theirs(tag, number);
        if (other) receive_of[size_t(is_send ? number : *other)] = is_send ? *other : number;
      }
      return receive_of;
    };
    EXPECT_EQ(pairs(true), pairs(false)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace lightcc
