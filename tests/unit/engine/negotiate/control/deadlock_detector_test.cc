// Deadlocks by script: given what ranks are blocked on and what they answer, who is asked and who is told.
#include "engine/negotiate/control/deadlock_detector.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

// Group 0 is the world of four ranks; 1 is ranks 0 and 1; 2 is ranks 1, 2 and 3.
bool belongs(int rank, int group) { return group == 0 || (group == 1 && rank < 2) || (group == 2 && rank > 0); }
BlockedReport blocked(int rank, int group, uint32_t state = 1, const std::string& key = "allreduce.x") {
  return {rank, state, group, Kind::allreduce, key};
}
BlockedReport goes_on(int rank, uint32_t state) { return {rank, state, -1, Kind::barrier, ""}; }

// "0.1?1 in 2" asks rank 0, in its first state, about rank 1 in group 2; "!" for "?" tells it that both have confirmed.
std::string asked(DeadlockDetector& detector) {
  std::string line;
  for (const DeadlockProbe& one : detector.take_messages())
    line += (line.empty() ? "" : " ") + std::to_string(one.rank) + "." + std::to_string(one.state) +
            (one.confirmed ? "!" : "?") + std::to_string(one.other) + " in " + std::to_string(one.group);
  return line;
}

TEST(DeadlockDetector, TwoThatConfirmAreToldOfEachOther) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(1, 1));
  EXPECT_EQ(asked(detector), "");
  detector.receive(blocked(0, 0));
  EXPECT_EQ(asked(detector), "0.1?1 in 1 1.1?0 in 0");
  detector.receive(DeadlockReply{1, 1, 0, 0, true});
  EXPECT_EQ(asked(detector), "");
  detector.receive(DeadlockReply{0, 1, 1, 1, true});
  EXPECT_EQ(asked(detector), "0.1!1 in 1 1.1!0 in 0");
  detector.receive(DeadlockReply{0, 1, 1, 1, true});
  EXPECT_EQ(asked(detector), "") << "once";
  detector.receive(goes_on(0, 2)), detector.receive(goes_on(1, 2));
  detector.receive(blocked(0, 0, 3)), detector.receive(blocked(1, 1, 3));
  EXPECT_EQ(asked(detector), "1.3?0 in 0 0.3?1 in 1") << "they fell into it again";
}

TEST(DeadlockDetector, NobodyIsAskedAboutWhatIsNoDeadlock) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(0, 0)), detector.receive(blocked(1, 0));
  detector.receive(blocked(2, 2, 1, "allreduce.y"));
  detector.receive({3, 1, 2, Kind::allgather, "allreduce.x"});
  EXPECT_EQ(asked(detector), "") << "the same set; other operations";
  detector.receive(blocked(2, 2, 2));
  EXPECT_EQ(asked(detector), "2.2?1 in 0 1.1?2 in 2") << "rank 0 is not in group 2";
  detector.receive(goes_on(0, 2));
  detector.receive(blocked(0, 1));
  EXPECT_EQ(asked(detector), "") << "rank 2 is not in group 1, and rank 1 is being asked";
}

TEST(DeadlockDetector, WhoGoesOnIsAskedNoMore) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(0, 0)), detector.receive(blocked(1, 1));
  EXPECT_NE(asked(detector), "");
  detector.receive(DeadlockReply{0, 1, 1, 1, true});
  detector.receive(goes_on(0, 2));
  detector.receive(DeadlockReply{1, 1, 0, 0, true});
  EXPECT_EQ(asked(detector), "");
  detector.receive(blocked(0, 0, 3));
  EXPECT_EQ(asked(detector), "0.3?1 in 1 1.1?0 in 0");
  detector.receive(goes_on(1, 2));
  detector.receive(blocked(1, 1, 2));
  EXPECT_EQ(asked(detector), "1.2?0 in 0 0.3?1 in 1");
  detector.receive(DeadlockReply{1, 1, 0, 0, true}), detector.receive(DeadlockReply{0, 1, 1, 1, true});
  EXPECT_EQ(asked(detector), "") << "answers to the question before";
  detector.receive(DeadlockReply{1, 2, 0, 1, true});
  EXPECT_EQ(asked(detector), "") << "about another group";
  detector.receive(DeadlockReply{1, 2, 0, 0, true}), detector.receive(DeadlockReply{0, 3, 1, 1, true});
  EXPECT_EQ(asked(detector), "0.3!1 in 1 1.2!0 in 0");
}

TEST(DeadlockDetector, AutomaticNamesDifferBetweenSets) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(0, 0, 1, "allreduce.noname.4")), detector.receive(blocked(1, 1, 1, "allreduce.noname.7"));
  const auto probes = detector.take_messages();
  ASSERT_EQ(probes.size(), 2u);
  EXPECT_EQ(probes[0].rank, 1);
  EXPECT_EQ(probes[0].key, "allreduce.noname.4");
  EXPECT_EQ(probes[1].key, "allreduce.noname.7");
}

TEST(DeadlockDetector, WhoIsLeftBehindIsAskedAboutTheNext) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(0, 0)), detector.receive(blocked(1, 1));
  detector.receive(DeadlockReply{0, 1, 1, 1, true}), detector.receive(DeadlockReply{1, 1, 0, 0, true});
  asked(detector);
  detector.receive(goes_on(0, 2));  // before it heard of it
  EXPECT_EQ(asked(detector), "");
  detector.receive(blocked(0, 0, 3));
  EXPECT_EQ(asked(detector), "0.3?1 in 1 1.1?0 in 0");
}

TEST(DeadlockDetector, WhoDeniesIsAskedAboutTheNext) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(1, 0)), detector.receive(blocked(2, 2)), detector.receive(blocked(3, 2));
  EXPECT_EQ(asked(detector), "2.1?1 in 0 1.1?2 in 2");
  detector.receive(DeadlockReply{2, 1, 1, 0, false});
  EXPECT_EQ(asked(detector), "1.1?3 in 2 3.1?1 in 0");
  detector.receive(DeadlockReply{1, 1, 3, 2, true}), detector.receive(DeadlockReply{3, 1, 1, 0, true});
  EXPECT_EQ(asked(detector), "3.1!1 in 0 1.1!3 in 2");
}

BlockedReport waits(int rank, int group, const std::string& key, std::vector<int32_t> missing, uint32_t answers = 0) {
  return {rank, 1, group, Kind::allreduce, "allreduce." + key, std::move(missing), answers};
}
using Cycles = std::vector<std::vector<int>>;

TEST(DeadlockDetector, ACycleThroughSeveralSetsIsToldOnceAllOfItHaveSaidSoAgain) {
  DeadlockDetector detector(belongs);
  detector.receive(waits(2, 2, "c", {1, 3})), detector.receive(waits(2, 2, "c", {1, 3}));
  detector.receive(blocked(1, 1, 1, "allreduce.b")), detector.receive(waits(1, 1, "b", {0}));
  EXPECT_EQ(asked(detector), "") << "rank 3 may be late, and rank 0 waits for nobody that is known";
  detector.receive(blocked(0, 0, 1, "allreduce.a")), detector.receive(waits(0, 0, "a", {1, 2}));
  EXPECT_EQ(asked(detector), "0.1?-1 in 0 1.1?-1 in 1");
  EXPECT_EQ(detector.take_cycles(), Cycles{});
  detector.receive(waits(0, 0, "a", {1, 2}, 1));
  EXPECT_EQ(detector.take_cycles(), Cycles{});
  detector.receive(waits(1, 1, "b", {0}, 1));
  EXPECT_EQ(detector.take_cycles(), (Cycles{{0, 1}}));
  detector.receive(waits(1, 1, "b", {0}, 1));
  EXPECT_EQ(detector.take_cycles(), Cycles{}) << "once";
}

TEST(DeadlockDetector, WhatHadBeenAnnouncedBeforeTheNextWasBlockedClosesNoCycle) {
  DeadlockDetector detector(belongs);
  detector.receive(blocked(0, 0, 1, "allreduce.a")), detector.receive(waits(0, 0, "a", {1, 2}));
  detector.receive(blocked(1, 1, 1, "allreduce.b")), detector.receive(waits(1, 1, "b", {0}));
  EXPECT_EQ(asked(detector), "0.1?-1 in 0 1.1?-1 in 1");
  detector.receive(waits(1, 1, "b", {0}, 1));
  detector.receive(waits(0, 0, "a", {2}, 1));  // rank 1 had announced it, and waits in turn: rank 2 is late
  EXPECT_EQ(detector.take_cycles(), Cycles{});
}

TEST(DeadlockDetector, ACycleInsideOneSetIsThatSetsToTell) {
  DeadlockDetector detector(belongs);
  for (int round : {0, 1})
    for (int rank : {0, 1}) detector.receive(waits(rank, 1, rank ? "b" : "a", {1 - rank}, uint32_t(round)));
  EXPECT_EQ(asked(detector), "");
  EXPECT_EQ(detector.take_cycles(), Cycles{});
}

TEST(DeadlockDetector, AnswersThatNobodyAskedForAreIgnored) {
  DeadlockDetector detector(belongs);
  detector.receive(DeadlockReply{0, 1, 1, 1, true}), detector.receive(goes_on(2, 1));
  detector.receive(blocked(0, 0));
  for (int other : {0, 1, -1, 77, INT32_MAX}) detector.receive(DeadlockReply{0, 1, other, 1, true});
  EXPECT_EQ(asked(detector), "");
}

}  // namespace
}  // namespace lightcc
