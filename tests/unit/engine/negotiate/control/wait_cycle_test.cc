// Who waits for whom, by script: given what members are blocked on and what they have announced, which cycle is told.
#include "engine/negotiate/control/wait_cycle.h"

#include <gtest/gtest.h>

#include "engine/negotiate/control/coordinator.h"
#include "unit/announcements.h"

namespace lightcc {
namespace {

using test::allreduce;

// "a: 0 for 1 2, b: 1 for 0": members wait in a request for others.
std::string told(const std::vector<Wait>& cycle) {
  std::string line;
  const auto add = [&](const std::vector<int>& members) {
    for (int member : members) line += " " + std::to_string(member);
  };
  for (const Wait& wait : cycle) {
    line += (line.empty() ? "" : ", ") + wait.key + ":";
    add(wait.members);
    line += " for";
    add(wait.missing);
  }
  return line;
}

struct Members : testing::Test {
  Coordinator c{{0, 1, 2, 3}, {{1 << 20, true}, 100}};
  void announce(int member, const std::string& key) { c.announce(member, key, allreduce(4)); }
  std::string blocked(int member, const std::string& key) { return told(c.blocked(member, key)); }
};

TEST_F(Members, TwoThatCallTwoOperationsInAnotherOrderAreToldOnce) {
  announce(0, "a"), announce(1, "b");
  EXPECT_EQ(blocked(0, "a"), "");
  EXPECT_EQ(blocked(1, "b"), "b: 1 for 0 2 3, a: 0 for 1 2 3");
  EXPECT_EQ(blocked(1, "b"), "");
  announce(2, "b");
  EXPECT_EQ(blocked(2, "b"), "") << "of which it has been told";
}

TEST_F(Members, OneThatAloneCallsAnOperationIsToldWithTheOthers) {  // if rank == 0: allreduce(...)
  announce(0, "metric");
  for (int member : {1, 2, 3}) {
    announce(member, "loss");
    EXPECT_EQ(blocked(member, "loss"), "");
  }
  EXPECT_EQ(blocked(0, "metric"), "metric: 0 for 1 2 3, loss: 1 2 3 for 0");
}

TEST_F(Members, ACycleOfThreeIsFound) {
  for (int member : {0, 2, 3}) announce(member, "a");
  for (int member : {1, 0, 3}) announce(member, "b");
  for (int member : {2, 1, 3}) announce(member, "c");
  EXPECT_EQ(blocked(0, "a"), "");
  EXPECT_EQ(blocked(1, "b"), "");
  EXPECT_EQ(blocked(2, "c"), "c: 2 for 0, a: 0 for 1, b: 1 for 2");
}

TEST_F(Members, WhoIsLateOrComputesIsInNoCycle) {
  for (int member : {0, 1, 2}) {
    announce(member, "a");
    EXPECT_EQ(blocked(member, "a"), "");
  }
}

TEST_F(Members, WhoHasAnnouncedItAndWaitsForAnotherIsInNoCycle) {
  for (int member : {0, 1}) announce(member, "a");
  announce(1, "b");
  EXPECT_EQ(blocked(0, "a"), "");
  EXPECT_EQ(blocked(1, "b"), "") << "member 0 waits for 2 and 3, which compute";
}

TEST_F(Members, WhoGoesOnIsInNoCycleAnyMore) {
  announce(0, "a"), announce(1, "b");
  EXPECT_EQ(blocked(0, "a"), "");
  announce(0, "b");
  EXPECT_EQ(blocked(1, "b"), "") << "another thread of member 0 has come";
}

TEST_F(Members, WhoHasGotWhatItWaitedForIsInNoCycle) {
  announce(0, "a");
  EXPECT_EQ(blocked(0, "a"), "");
  for (int member : {1, 2, 3}) announce(member, "a");
  announce(1, "b");
  EXPECT_EQ(blocked(1, "b"), "") << "it runs";
  c.take_messages();
  EXPECT_EQ(blocked(1, "b"), "") << "member 0 computes now";
}

TEST_F(Members, NobodyWaitsForWhoHasJoined) {
  Announcement join;
  join.kind = Kind::join;
  announce(0, "a"), announce(1, "b");
  EXPECT_EQ(blocked(0, "a"), "");
  c.announce(2, kJoinKey, join), c.announce(3, kJoinKey, join);
  EXPECT_EQ(blocked(1, "b"), "b: 1 for 0, a: 0 for 1");
}

TEST(ClosedCycle, TheShortestIsFoundThroughTheRequestThatIsAskedFor) {
  const auto find = [](std::vector<Wait> waits, const std::string& from) {
    std::map<std::string, Wait> by_key;
    for (Wait& wait : waits) by_key[wait.key] = wait;
    return told(find_cycle(by_key, from));
  };
  const std::vector<Wait> three{{"a", {0}, {1}}, {"b", {1}, {2}}, {"c", {2}, {0}}, {"d", {3}, {0}}};
  EXPECT_EQ(find(three, "a"), "a: 0 for 1, b: 1 for 2, c: 2 for 0");
  EXPECT_EQ(find(three, "c"), "c: 2 for 0, a: 0 for 1, b: 1 for 2");
  EXPECT_EQ(find(three, "d"), "") << "it waits for a cycle, and is not in it";
  EXPECT_EQ(find(three, "e"), "");
  EXPECT_EQ(find({{"a", {0}, {1, 2}}, {"b", {1}, {2}}, {"c", {2}, {0}}}, "a"), "a: 0 for 1 2, c: 2 for 0");
}

}  // namespace
}  // namespace lightcc
