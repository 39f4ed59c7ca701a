// What transports know of their links, and what they rely on.
#include "net/link_table.h"

#include <gtest/gtest.h>

#include <vector>

namespace lightcc {
namespace {

struct State {
  int number;
};

class LinkTableTest : public testing::Test {
 protected:
  State& get(const LinkKey& key) {
    return table_.get(key, [&] { return std::make_unique<State>(State{++made_}); });
  }
  std::vector<int> of_group(int group) {
    std::vector<int> numbers;
    for (auto& [key, state] : table_.of_group(group)) numbers.push_back(state->number);
    return numbers;
  }
  LinkTable<State> table_{1};
  int made_ = 0;
};

TEST_F(LinkTableTest, MakesALinkOnceHoweverOftenItIsAskedFor) {
  State& first = get({0, -1, 2});
  EXPECT_EQ(&get({0, -1, 2}), &first);
  EXPECT_EQ(table_.find({0, -1, 2}), &first);
  EXPECT_EQ(table_.find({0, 0, 2}), nullptr);
  EXPECT_EQ(made_, 1);
}

TEST_F(LinkTableTest, HasNoLinkThatCouldNotBeMade) {
  const auto fail = []() -> std::unique_ptr<State> { throw Error(Code::internal, "no memory"); };
  EXPECT_THROW(table_.get({0, 0, 2}, fail), Error);
  EXPECT_EQ(table_.find({0, 0, 2}), nullptr);
  EXPECT_EQ(get({0, 0, 2}).number, 1);
}

TEST_F(LinkTableTest, KnowsTheLinksOfAGroup) {
  for (const LinkKey& key : {LinkKey{3, 0, 2}, {3, -1, 2}, {2, 7, 9}, {4, LinkKey::kProbe, 0}}) get(key);
  EXPECT_EQ(of_group(3), (std::vector<int>{2, 1}));
  table_.erase(table_.of_group(3));
  EXPECT_EQ(of_group(3), std::vector<int>{});
  EXPECT_EQ(of_group(2), std::vector<int>{3});
  EXPECT_EQ(of_group(4), std::vector<int>{4});
}

TEST_F(LinkTableTest, TheHigherRankConnects) {
  EXPECT_TRUE(table_.connects(0));
  EXPECT_FALSE(table_.connects(2));
}

TEST_F(LinkTableTest, KeepsTheFirstCauseOfTheEnd) {
  EXPECT_FALSE(table_.ended());
  EXPECT_TRUE(table_.end_epoch(Error(Code::peer_lost, "rank 2 died")));
  EXPECT_FALSE(table_.end_epoch(Error(Code::shut_down, "this rank has shut down")));
  EXPECT_STREQ(table_.ended()->what(), "rank 2 died");
}

}  // namespace
}  // namespace lightcc
