#include "engine/request/group_table.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

const Topology kTopology = Topology::by_leader({0, 0, 2});

TEST(GroupTable, GivesTheIdsThatWereFreedFirst) {
  GroupTable table;
  for (int id : {0, 1, 2, 3}) EXPECT_EQ(table.add({0, 1, 2}, 0, kTopology)->id(), id);
  table.remove(2);
  table.remove(1);
  EXPECT_EQ(table.ids(), (std::vector{0, 3}));
  for (int id : {2, 1, 4}) EXPECT_EQ(table.add({0, 1}, 0, kTopology)->id(), id);
  EXPECT_EQ(table.ids(), (std::vector{0, 1, 2, 3, 4}));
}

TEST(GroupTable, FindsWhatItHasUntilItIsRemoved) {
  GroupTable table;
  EXPECT_EQ(table.find(0), nullptr);
  table.add({0, 1, 2}, 0, kTopology);
  const auto pair = table.add({2, 1}, 0, kTopology);
  EXPECT_EQ(table.find(1), pair);
  EXPECT_EQ(pair->ranks(), (std::vector{2, 1}));
  EXPECT_EQ(pair->index(), -1) << "this rank is no member";
  table.remove(1);
  EXPECT_EQ(table.find(1), nullptr);
  EXPECT_EQ(pair->size(), 2) << "who still has it may use it";
}

}  // namespace
}  // namespace lightcc
