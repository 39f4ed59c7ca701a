// Who shares a host: hosts and places on them, worked out from each rank's leader.
#include "net/topology.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Hosts = std::vector<std::vector<int>>;

TEST(Topology, HostsComeInTheOrderOfTheirFirstRanks) {
  const std::vector<int> leaders{0, 1, 0, 3, 1, 0};  // the launcher dealt the ranks out
  const Topology topology = Topology::by_leader(leaders);
  EXPECT_EQ(topology.ranks(), 6);
  EXPECT_EQ(topology.hosts, (Hosts{{0, 2, 5}, {1, 4}, {3}}));
  EXPECT_EQ(topology.host_of, (std::vector{0, 1, 0, 2, 1, 0}));
  EXPECT_EQ(topology.local, (std::vector{0, 0, 1, 0, 1, 2}));
  for (int rank = 0; rank < topology.ranks(); ++rank) {
    EXPECT_EQ(topology.leader(rank), leaders[size_t(rank)]);
    EXPECT_EQ(topology.hosts[size_t(topology.host_of[size_t(rank)])][size_t(topology.local[size_t(rank)])], rank);
    for (int other = 0; other < topology.ranks(); ++other)
      EXPECT_EQ(topology.share_host(rank, other), leaders[size_t(rank)] == leaders[size_t(other)]);
  }
}

TEST(Topology, RanksOfOneHostAreOneNode) {
  for (int ranks : {1, 2, 5}) {
    const Topology topology = Topology::one_host(ranks);
    EXPECT_EQ(topology.ranks(), ranks);
    EXPECT_EQ(topology.hosts.size(), 1u);
    EXPECT_EQ(topology.local.back(), ranks - 1);
    EXPECT_TRUE(topology.share_host(0, ranks - 1));
    EXPECT_TRUE(topology.is_homogeneous());
  }
}

TEST(Topology, AsTextAndWhetherAllHostsAreAlike) {
  const struct { std::vector<int> leaders; const char* text; bool homogeneous; } rows[] = {
      {{0}, "1 host: ranks 0", true},
      {{0, 0, 0}, "1 host: ranks 0, 1, 2", true},
      {{0, 1, 2}, "3 hosts: ranks 0 | 1 | 2", true},
      {{0, 1, 0, 1}, "2 hosts: ranks 0, 2 | 1, 3", true},
      {{0, 0, 2}, "2 hosts: ranks 0, 1 | 2", false},
      {{0, 1, 1, 1}, "2 hosts: ranks 0 | 1, 2, 3", false}};
  for (auto& row : rows) {
    const Topology topology = Topology::by_leader(row.leaders);
    EXPECT_EQ(topology.text(), row.text);
    EXPECT_EQ(topology.is_homogeneous(), row.homogeneous) << row.text;
  }
}

TEST(Topology, ContradictionsAreRefusedByName) {
  const struct { std::vector<int> leaders; const char* who; } rows[] = {
      {{1, 1}, "rank 0 says that it shares a host with rank 1"},          // a leader comes first
      {{0, 0, 1}, "rank 2 says that it shares a host with rank 1"},       // which itself follows rank 0
      {{0, -1}, "rank 1 says that it shares a host with rank -1"},        // no rank
      {{0, 1, 3}, "rank 2 says that it shares a host with rank 3"},       // nor is this
      {{0, INT32_MIN}, "rank 1 says that it shares a host with rank -2147483648"}};
  for (auto& row : rows) try {
      Topology::by_leader(row.leaders);
      ADD_FAILURE() << row.who;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::internal);
      EXPECT_EQ(error.what(), std::string("init: ") + row.who + ", which does not lead its host");
    }
}

}  // namespace
}  // namespace lightcc
