// What member 0 makes of what members say, with no messages around it.
#include "engine/negotiate/coordination.h"

#include <gtest/gtest.h>

#include "labels.h"
#include "unit/announcements.h"
#include "unit/group_parts.h"
#include "unit/thread_peers.h"

LABEL(alone);

namespace lightcc {
namespace {

using namespace test;

struct World {  // of three ranks on one host, at its coordinator
  explicit World(int id = 0) : group(id, {0, 1, 2}, 0, parts.peers->topology()) {}

  GroupParts parts{std::move(thread_peers({3})[0])};
  std::shared_ptr<const Group> in_table = parts.surroundings.groups.add({0, 1, 2}, 0, parts.peers->topology());
  Group group;
  GroupBackends backends{*parts.peers, group, parts.config};
  StallReporter stalls{parts.shared, group};
  Coordination coordination{parts.shared, group, backends, stalls, {}};
  std::optional<DownMessage> say(int member, UpMessage message) {
    MemberMessage received{member, std::move(message)};
    return coordination.receive(received);
  }
};

TEST(Coordination, RunsWhatAllHaveAnnouncedUnlessItGathers) {
  World world;
  for (int member : {0, 1, 2}) {
    EXPECT_TRUE(world.coordination.decide(0, 1).empty()) << "before member " << member << " has announced it";
    EXPECT_FALSE(world.say(member, Announce{"allreduce.x", allreduce(4)}));
  }
  EXPECT_TRUE(world.coordination.decide(1, 1).empty()) << "while a batch runs";
  const auto messages = world.coordination.decide(0, 1);
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(std::get<Batch>(messages[0]).responses.at(0).key, "allreduce.x");
}

TEST(Coordination, AnAnswerKnowsWhatWasSaidBeforeTheQuestionInTheSameStep) {
  World world;
  world.say(2, Announce{"allreduce.x", allreduce(4)});
  world.say(1, BlockedReport{.rank = 1, .state = 1, .group = 0, .kind = Kind::allreduce, .key = "allreduce.y"});
  world.say(2, Query{"allreduce.x", 2});
  const auto answers = world.coordination.take_answers();
  ASSERT_EQ(answers.size(), 1u);
  const Missing& missing = std::get<Missing>(answers[0]);
  EXPECT_EQ(missing.to, 2);
  EXPECT_EQ(missing.members, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(missing.note, "rank 1 itself waits for allreduce of tensor 'y' in process set 0 (ranks 0, 1, 2)");
  EXPECT_TRUE(world.coordination.take_answers().empty()) << "each is answered once";
}

TEST(Coordination, LaunchTurnsAreToldAtOnceAndInTheWorldOnly) {
  World world, other(1);
  const auto turn = world.say(1, LaunchRequest{1, 3, {0, 1}});
  ASSERT_TRUE(turn);
  EXPECT_EQ(std::get<LaunchTurn>(*turn).group, 3);
  for (const UpMessage& message : {UpMessage(LaunchRequest{1, 3, {0, 1}}), UpMessage(BlockedReport{}),
                                   UpMessage(DeadlockReply{1, 1, 2, 1, true})})
    EXPECT_THROW(other.say(1, message), Error);
}

}  // namespace
}  // namespace lightcc
