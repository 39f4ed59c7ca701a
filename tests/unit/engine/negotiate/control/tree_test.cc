// The tree of a group: who speaks to whom.
#include "engine/negotiate/control/tree.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

std::vector<int> all(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}
Topology hosts_of(int hosts, int each) {
  std::vector<int> leader;
  for (int rank = 0; rank < hosts * each; ++rank) leader.push_back(rank / each * each);
  return Topology::by_leader(leader);
}

Tree tree_of(const std::vector<int>& ranks, const Topology& topology, int member) {
  return Tree(Group(0, ranks, ranks[size_t(member)], topology));
}

TEST(Tree, OnOneHostAllAreBelowMember0) {
  const Tree root = tree_of({3, 0, 2}, Topology::one_host(4), 0);
  EXPECT_TRUE(root.is_root());
  EXPECT_EQ(root.children, (std::vector{1, 2}));
  EXPECT_EQ(root.below, (std::vector<std::vector<int>>{{1}, {2}}));
  for (int member : {1, 2}) {
    const Tree leaf = tree_of({3, 0, 2}, Topology::one_host(4), member);
    EXPECT_EQ(leaf.parent(), 0);
    EXPECT_TRUE(leaf.children.empty());
    EXPECT_EQ(leaf.subtree, std::vector{member});
  }
}

TEST(Tree, AHostHangsBelowItsFirstMember) {
  const Topology topology = hosts_of(3, 2);
  const std::vector<int> ranks = {3, 0, 2, 1, 5};  // hosts 1, 0, 1, 0, 2
  const Tree root = tree_of(ranks, topology, 0), leader = tree_of(ranks, topology, 1),
             leaf = tree_of(ranks, topology, 3), alone = tree_of(ranks, topology, 4);
  EXPECT_EQ(root.children, (std::vector{2, 1, 4})) << "its own host first";
  EXPECT_EQ(root.below, (std::vector<std::vector<int>>{{2}, {1, 3}, {4}}));
  EXPECT_EQ(root.subtree, (std::vector{0, 2, 1, 3, 4}));
  EXPECT_EQ(leader.parent(), 0);
  EXPECT_EQ(leader.children, std::vector{3});
  EXPECT_EQ(leaf.ancestors, (std::vector{1, 0}));
  EXPECT_EQ(alone.parent(), 0);
  EXPECT_EQ(root.toward(3), 1);
  EXPECT_EQ(root.toward(0), -1);
  for (int nobody : {-1, 5, INT32_MAX, INT32_MIN}) EXPECT_EQ(root.toward(nobody), -1);
}

TEST(Tree, NobodyHasManyNeighboursAndNobodyIsFarAway) {
  const int hosts = 1000, each = 3;
  const Topology topology = hosts_of(hosts, each);
  for (int member : {0, 1, 3, 27, 30, 300, 2999}) {
    const Tree tree = tree_of(all(hosts * each), topology, member);
    EXPECT_LE(tree.children.size(), size_t(Tree::kFanOut + each - 1)) << member;
    EXPECT_LE(tree.ancestors.size(), 5u) << member;
  }
}

TEST(Tree, AllMembersSeeTheSame) {
  const uint64_t seed = test::run_seed();
  std::mt19937_64 random(seed);
  for (int turn = 0; turn < 200; ++turn) {
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", turn " << turn);
    const int world = 1 + int(random() % 60), hosts = 1 + int(random() % 25);
    std::vector<int> leader, first(size_t(hosts), -1), ranks = all(world);
    for (int rank = 0; rank < world; ++rank) {
      int& its = first[random() % size_t(hosts)];
      if (its < 0) its = rank;
      leader.push_back(its);
    }
    const Topology topology = Topology::by_leader(leader);
    std::shuffle(ranks.begin(), ranks.end(), random);
    ranks.resize(1 + random() % ranks.size());
    const int size = int(ranks.size());
    std::vector<Tree> trees;
    for (int member = 0; member < size; ++member) trees.push_back(tree_of(ranks, topology, member));
    EXPECT_EQ(trees[0].subtree.size(), size_t(size)) << "everyone is below member 0";
    for (int member = 0; member < size; ++member) {
      const Tree& tree = trees[size_t(member)];
      EXPECT_EQ(tree.is_root(), member == 0);
      for (size_t i = 0; i < tree.children.size(); ++i) {
        const Tree& child = trees[size_t(tree.children[i])];
        EXPECT_EQ(child.parent(), member);
        EXPECT_EQ(tree.below[i], child.subtree);
        for (int one : tree.below[i]) EXPECT_EQ(tree.toward(one), int(i));
      }
      const auto share = [&](int a, int b) { return topology.share_host(ranks[size_t(a)], ranks[size_t(b)]); };
      for (int child : tree.children)
        EXPECT_TRUE(!share(member, child) || trees[size_t(child)].children.empty()) << "below its host's leader";
      if (member > 0) {
        EXPECT_EQ(tree.ancestors.size(), trees[size_t(tree.parent())].ancestors.size() + 1);
      }
      for (int other = 0; other < member; ++other)
        EXPECT_FALSE(!tree.children.empty() && share(member, other)) << "its host's first";
    }
  }
}

}  // namespace
}  // namespace lightcc
