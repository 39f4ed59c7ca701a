// Which communicators come out of a split, for what the ranks call it with.
#include "api/mpiabi/split.h"

#include <gtest/gtest.h>

namespace lightcc::mpiabi {
namespace {

constexpr int kUndefined = -1;
using Found = std::vector<std::vector<int>>;

Found split(const std::vector<SplitCall>& calls) { return communicators_of(calls, kUndefined); }

TEST(MpiSplit, MembersHaveOneColourAndAreOrderedByKey) {
  EXPECT_EQ(split({{0, 0, 7, 1}, {0, 1, 2, 0}, {0, 2, 7, 0}, {0, 3, 2, 0}}), (Found{{1, 3}, {2, 0}}));
}

TEST(MpiSplit, RanksWithOneKeyKeepTheOrderOfTheirParent) {
  EXPECT_EQ(split({{5, 2, 0, 0}, {5, 1, 0, 0}, {5, 0, 0, 0}}), (Found{{2, 1, 0}}));
}

TEST(MpiSplit, WhoIsUndefinedIsInNone) {
  EXPECT_EQ(split({{0, 0, 1, 0}, {0, 1, kUndefined, 0}, {0, 2, 1, 0}}), (Found{{0, 2}}));
  EXPECT_EQ(split({{0, 0, kUndefined, 0}}), Found{});
}

TEST(MpiSplit, OneColourInTwoParentsIsTwo) {
  EXPECT_EQ(split({{4, 0, 1, 0}, {4, 1, 1, 0}, {3, 0, 1, 0}, {3, 1, 1, 0}}), (Found{{2, 3}, {0, 1}}));
}

TEST(MpiSplit, KeysMayBeNegative) { EXPECT_EQ(split({{0, 0, 0, 1}, {0, 1, 0, -1}}), (Found{{1, 0}})); }

}  // namespace
}  // namespace lightcc::mpiabi
