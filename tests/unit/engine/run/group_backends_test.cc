#include "engine/run/group_backends.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "labels.h"
#include "unit/thread_peers.h"

LABEL(as_placed);

namespace lightcc {
namespace {

Collective sum(int size) {
  Collective c{};
  c.kind = Kind::allreduce;
  c.op = ReduceOp::sum;
  c.dtype = DType::float32;
  c.size = size;
  c.count = 1;
  return c;
}

TEST(GroupBackends, AreThoseThatTheHostsOfTheMembersAllow) {
  for (const auto& hosts : {std::vector<int>{2}, std::vector<int>{1, 1}}) {
    auto peers = test::thread_peers(hosts);
    const Group group(0, {0, 1}, 0, peers[0]->topology());
    const Config config;
    const GroupBackends backends(*peers[0], group, config);
    const bool on_one_host = hosts.size() == 1;
    EXPECT_EQ(backends.shared() != nullptr, on_one_host);
    EXPECT_EQ(backends.nodes().size(), hosts.size());
    EXPECT_EQ(backends.nccl_2d() == nullptr, on_one_host);
    EXPECT_EQ(backends.selector().choose(sum(2)).backend == backends.shared(), on_one_host);
  }
}

TEST(GroupBackends, NcclCompressesWhereAllNodesHaveEquallyManyMembers) {
  auto peers = test::thread_peers({2, 2});
  const Config config;
  for (const auto& [members, is_even] :
       {std::pair(std::vector<int>{0, 1, 2, 3}, true), {{0, 1, 2}, false}, {{0, 2}, false}, {{0, 1}, false}}) {
    const Group group(0, members, 0, peers[0]->topology());
    const GroupBackends backends(*peers[0], group, config);
    EXPECT_EQ(backends.nccl_codec() != nullptr, is_even);
  }
}

TEST(GroupBackends, ARuleThatIsUsedGoesBeforeTheOthersUntilThereAreNewOnes) {
  auto peers = test::thread_peers({1, 1});
  const Group group(0, {0, 1}, 0, peers[0]->topology());
  const Config config;
  GroupBackends backends(*peers[0], group, config);
  const auto chosen = [&] { return text_of(backends.selector().choose(sum(2))); };
  const std::string by_default = chosen();
  const Rule rules[] = {{Kind::allreduce, 0, 0, 0, "links", "ring"}};
  backends.use_rules(rules);
  EXPECT_EQ(chosen(), "links/ring");
  EXPECT_NE(by_default, chosen());
  backends.use_rules({});
  EXPECT_EQ(chosen(), by_default);
}

}  // namespace
}  // namespace lightcc
