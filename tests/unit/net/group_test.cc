// A process set as one rank sees it.
#include "net/group.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Hosts = std::vector<std::vector<int>>;

Topology uneven() { return Topology::by_leader({0, 0, 0, 3, 4, 4}); }  // hosts of 3, 1 and 2 ranks

TEST(Group, AMemberIsItsPlaceInTheListOfRanks) {
  const Group group(7, {5, 0, 3}, 3, uneven());
  EXPECT_EQ(group.id(), 7);
  EXPECT_EQ(group.size(), 3);
  EXPECT_EQ(group.ranks(), (std::vector{5, 0, 3}));
  EXPECT_EQ(group.index(), 2);
  for (int member = 0; member < group.size(); ++member) {
    EXPECT_TRUE(group.has_member(member));
    EXPECT_EQ(group.index_of(group.rank(member)), member);
    EXPECT_TRUE(group.contains(group.rank(member)));
  }
  for (int nobody : {-1, 3, INT32_MAX, INT32_MIN}) EXPECT_FALSE(group.has_member(nobody)) << nobody;
}

TEST(Group, RanksThatAreNotInIt) {
  const Group group(1, {5, 0, 3}, 4, uneven());
  EXPECT_EQ(group.index(), -1) << "of a rank that is no member";
  for (int rank : {1, 2, 4, 6, -1, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(group.index_of(rank), -1) << rank;
    EXPECT_FALSE(group.contains(rank)) << rank;
  }
}

TEST(Group, HostsComeInTheOrderOfTheirFirstMembers) {
  const Group group(1, {4, 2, 3, 0, 5}, 0, uneven());
  EXPECT_EQ(group.hosts(), (Hosts{{0, 4}, {1, 3}, {2}}));
  for (int host = 0; host < int(group.hosts().size()); ++host)
    for (int member : group.hosts()[size_t(host)]) EXPECT_EQ(group.host_of(member), host);
  EXPECT_TRUE(group.share_host(0, 4));
  EXPECT_FALSE(group.share_host(0, 1));
  EXPECT_FALSE(group.on_one_host());
}

TEST(Group, AGroupOfOneHostHasNoOtherNodes) {
  const Group pair(1, {5, 4}, 4, uneven()), alone(2, {3}, 3, uneven());
  EXPECT_TRUE(pair.on_one_host());
  EXPECT_EQ(pair.hosts(), (Hosts{{0, 1}}));
  EXPECT_TRUE(alone.on_one_host());
}

TEST(Group, LocalIndicesCountAllRanksOfAHost) {
  const Group group(1, {5, 2, 3}, 2, uneven());
  EXPECT_EQ(group.local_indices(), (std::vector{1, 2, 0}));
  EXPECT_EQ(group.local_index(1), 2) << "ranks 0 and 1 of its host are not in the group";
}

}  // namespace
}  // namespace lightcc
