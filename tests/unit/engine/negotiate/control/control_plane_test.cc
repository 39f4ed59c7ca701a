// The control plane by script: all members of a group in one thread, joined by real links. Given these messages, who
// receives which, and from whom.
#include "engine/negotiate/control/control_plane.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/overloaded.h"
#include "engine/negotiate/control/call_slot.h"
#include "labels.h"
#include "unit/announcements.h"
#include "unit/thread_peers.h"

LABEL(alone);

namespace lightcc {
namespace {

using Lines = std::vector<std::string>;

using test::allreduce;
Announce announce(const std::string& key) { return {key, allreduce(1)}; }
Failure failure(const std::string& key) { return {key, Code::mismatch, "why", {}, {}}; }

std::string shown(const UpMessage& message) {
  return std::visit(Overloaded{[](const Announce& m) { return "announces " + m.key; },
                               [](const CachedRequest& m) { return "announces number " + std::to_string(m.id); },
                               [](const BucketReady& m) { return "announces bucket " + std::to_string(m.bucket); },
                               [](const PlanLeft& m) { return "has left plan " + std::to_string(m.plan); },
                               [](const Query& m) { return "asks for " + m.key; },
                               [](const MembersAbsent& m) { return "says who is absent from " + m.key; },
                               [](const Refused& m) { return "has refused " + m.key; },
                               [](const Contended& m) { return "has two threads at " + m.key; },
                               [](const NameGivenUp& m) { return "has given up " + m.key; },
                               [](const BlockedReport& m) { return "is blocked on " + m.key; },
                               [](const DeadlockReply&) { return std::string("replies"); },
                               [](const LaunchRequest& m) { return "asks for group " + std::to_string(m.group); },
                               [](const RankReport& m) { return "reports " + m.text; }},
                    message);
}
std::string shown(const DownMessage& message) {
  return std::visit(Overloaded{[](const Batch& m) { return "batch of " + std::to_string(m.responses.size()); },
                               [](const Plan& m) { return "plan " + std::to_string(m.plan); },
                               [](const PlanEnded& m) { return "end of plan " + std::to_string(m.plan); },
                               [](const BucketBatch& m) { return "batch of bucket " + std::to_string(m.bucket); },
                               [](const Tuned& m) { return "tuned to " + std::to_string(m.second); },
                               [](const Failure& m) { return m.key + " failed"; },
                               [](const Missing& m) { return "missing at " + m.key; },
                               [](const NameWithdrawn& m) { return m.key + " withdrawn"; },
                               [](const DeadlockProbe& m) { return "probe about " + m.key; },
                               [](const LaunchTurn& m) { return "turn of group " + std::to_string(m.group); }},
                    message);
}

// One member: its control plane, unless it is to be played by the test, and what that has told it.
struct PlaneMember {
  PlaneMember(Peers& own_peers, const std::vector<int>& ranks, bool played)
      : peers(own_peers), group(0, ranks, peers.rank(), peers.topology()) {
    if (!played) plane = std::make_unique<ControlPlane>(peers, group);
  }
  void step() {
    bool moved = false;
    while (auto event = plane->step(&moved)) hear(*event);
    plane->flush();
  }
  void hear(const ControlEvent& event) {
    std::visit(Overloaded{[&](const MemberMessage& one) {
                            heard.push_back(std::to_string(one.member) + " " + shown(one.message));
                          },
                          [&](const DownMessage& message) { heard.push_back(shown(message)); },
                          [&](const ReceivedSlot& slot) {
                            heard.push_back(std::to_string(slot.member) + " slot of " +
                                            std::to_string(slot.bytes.size()));
                          },
                          [&](const Departure& departure) {
                            heard.push_back(std::to_string(departure.member) + " left: " + departure.why);
                            while (auto before = plane->receive_from_below()) hear(*before);
                            plane->member_left(departure.member, departure.why, departure.from);
                          }},
               event);
  }

  Peers& peers;
  Group group;
  Lines heard;
  std::unique_ptr<ControlPlane> plane;
};

class Members {
 public:
  // Ranks on emulated hosts of so many each. ranks: of the members, all if none are given. played: a member that the
  // test plays itself.
  explicit Members(const std::vector<int>& hosts, std::vector<int> ranks = {}, int played = -1)
      : peers_(test::thread_peers(hosts)) {
    if (ranks.empty()) {
      ranks.resize(peers_.size());
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    for (int rank : ranks)
      members_.push_back(std::make_unique<PlaneMember>(*peers_[size_t(rank)], ranks, int(members_.size()) == played));
  }
  int size() const { return int(members_.size()); }
  PlaneMember& operator[](int member) { return *members_[size_t(member)]; }
  ControlPlane& plane(int member) { return *(*this)[member].plane; }

  void step() {
    for (auto& member : members_) {
      member->peers.step();
      if (member->plane) member->step();
      member->peers.flush_and_wake();
    }
  }
  // Steps all until the member has heard so many lines, and a while longer: nothing else may come.
  Lines heard(int member, size_t lines) {
    const uint64_t deadline_ns = now_ns() + 20'000'000'000;
    while ((*this)[member].heard.size() < lines && now_ns() < deadline_ns) step();
    for (int i = 0; i < 100; ++i) step();
    return std::exchange((*this)[member].heard, {});
  }

 private:
  std::vector<std::unique_ptr<Peers>> peers_;
  std::vector<std::unique_ptr<PlaneMember>> members_;
};

const std::vector<int> kOneHost = {3}, kThreeHosts = {2, 3, 1};  // there members 0, 2 and 5 speak for their hosts

TEST(ControlPlane, WhatAMemberSaysReachesTheCoordinatorAlone) {
  for (const auto& hosts : {kOneHost, kThreeHosts}) {
    Members members(hosts);
    members.plane(2).send_up(Query{"a", 2});
    EXPECT_EQ(members.heard(0, 1), Lines{"2 asks for a"});
    members.plane(0).send_up(Query{"b", 0});
    EXPECT_EQ(members.heard(0, 1), Lines{"0 asks for b"}) << "its own";
    EXPECT_EQ(members.heard(1, 0), Lines{});
    EXPECT_EQ(members.heard(2, 0), Lines{});
  }
}

TEST(ControlPlane, WhatTheCoordinatorSaysReachesAllInOrder) {
  for (const auto& hosts : {kOneHost, kThreeHosts}) {
    Members members(hosts);
    for (const char* key : {"a", "b"}) members.plane(0).send_down(failure(key));
    for (int member = 0; member < members.size(); ++member)
      EXPECT_EQ(members.heard(member, 2), (Lines{"a failed", "b failed"})) << member;
  }
}

TEST(ControlPlane, AnAnswerReachesOnlyWhomItIsFor) {
  for (const auto& hosts : {kOneHost, kThreeHosts}) {
    Members members(hosts);
    for (int to = 0; to < members.size(); ++to) {
      members.plane(0).send_down(Missing{"a", {1}, {}, to});
      EXPECT_EQ(members.heard(to, 1), Lines{"missing at a"});
      for (int member = 0; member < members.size(); ++member)
        EXPECT_EQ(members.heard(member, 0), Lines{}) << member << " heard what is for " << to;
    }
  }
}

TEST(ControlPlane, ASlotReachesTheOnlyNeighbourBehindWhatWasSaidBefore) {
  Members members({1, 1});
  members.plane(1).send_up(Query{"a", 1});
  members.plane(1).send_slot(encode(CallSlot{}, "data"));
  EXPECT_EQ(members.heard(0, 2), (Lines{"1 asks for a", "1 slot of 28"}));
  members.plane(0).send_slot(encode(CallSlot{}));
  members.plane(0).leave("why");
  EXPECT_EQ(members.heard(1, 2), (Lines{"0 slot of 24", "0 left: why"}));
  Members more({1, 1, 1});
  EXPECT_THROW(more.plane(0).send_slot(encode(CallSlot{})), Error);
}

TEST(ControlPlane, AnAnswerForNobodyIsAFault) {
  Members members(kThreeHosts);
  for (int to : {6, INT32_MAX}) EXPECT_THROW(members.plane(0).send_down(Missing{"a", {1}, {}, to}), Error) << to;
}

TEST(ControlPlane, AggregatedAnnouncementsArriveMemberByMember) {
  Members members(kThreeHosts);
  members.plane(3).send_up(announce("a"));
  members.plane(2).send_up(announce("a"));
  EXPECT_TRUE(members.plane(2).holds()) << "member 4 has not come";
  members.plane(4).send_up(announce("a"));
  EXPECT_EQ(members.heard(0, 3), (Lines{"2 announces a", "3 announces a", "4 announces a"}));
}

TEST(ControlPlane, WhatIsHeldPassesAtOnceWhenThisRankIsRung) {
  Members members(kThreeHosts);
  members.plane(2).send_up(announce("a"));
  members.plane(2).expedite();
  members.step();
  EXPECT_FALSE(members.plane(2).holds());
  EXPECT_EQ(members.heard(0, 1), Lines{"2 announces a"});
}

TEST(ControlPlane, AQuestionPassesBehindWhatIsHeld) {
  Members members(kThreeHosts);
  members.plane(2).send_up(announce("a"));
  members.plane(2).send_up(Query{"a", 2});
  EXPECT_EQ(members.heard(0, 2), (Lines{"2 announces a", "2 asks for a"}));
}

TEST(ControlPlane, MembersAreNumberedInTheirGroup) {
  Members members({2, 2}, {3, 1, 0});
  members.plane(1).send_up(announce("a"));
  members.plane(2).send_up(Refused{"a", "why", 2});
  EXPECT_EQ(members.heard(0, 2), (Lines{"1 announces a", "2 has refused a"}));
}

// ---- what is not to be believed

// A member sends its parent or a child what no control plane would; the error that it meets there.
std::string error_at(int to, int from, const std::string& bytes, const std::vector<int>& hosts,
                     const std::vector<int>& ranks = {}) {
  Members members(hosts, ranks, from);
  MessageStream stream(members[from].peers.control_link(0, members[to].peers.rank()));
  stream.send(bytes);
  try {
    members.heard(to, 1);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(ControlPlane, AMessageOfTheWrongDirectionNamesTheRankThatSentIt) {
  const std::vector<int> ranks = {2, 0, 1};
  const std::string down = encode(failure("a")), up = encode(announce("a"));
  EXPECT_EQ(error_at(0, 1, down, kOneHost, ranks), "rank 0 sent a message that only coordinators send");
  EXPECT_EQ(error_at(0, 2, down, kOneHost, ranks), "rank 1 sent a message that only coordinators send");
  EXPECT_EQ(error_at(1, 0, up, kOneHost, ranks), "rank 2 sent a message that only members send");
  EXPECT_EQ(error_at(2, 4, down, kThreeHosts), "rank 4 sent a message that only coordinators send") << "an aggregator";
}

TEST(ControlPlane, NobodySpeaksForAMemberThatIsNotBelowIt) {
  for (const auto& hosts : {kOneHost, kThreeHosts})
    for (int other : {0, 1, 17, -1})
      EXPECT_EQ(error_at(0, 2, encode(Query{"a", other}), hosts),
                "the coordinator was sent a message of a member that is not below its sender");
}

TEST(ControlPlane, NobodyReceivesWhatIsForAMemberThatIsNotBelowIt) {
  EXPECT_EQ(error_at(2, 0, encode(Missing{"a", {1}, {}, 5}), kThreeHosts),
            "an answer came to a member that it is not for");
}

TEST(ControlPlane, ALeavingThatCannotBeIsAFault) {
  for (int leaver : {0, 6, -1})
    EXPECT_EQ(error_at(0, 2, encode(UpFrame(MemberLeft{leaver, "why"})), kThreeHosts),
              "a member that cannot have left was said to have left");
}

// ---- members that leave

TEST(ControlPlane, AMemberThatLeavesIsSeenOnItsHostAndToldToAllOthersOnce) {
  Members members({2, 2, 2});
  members.plane(3).leave("done");
  members.plane(2).member_left(3, "done", ControlPlane::kSeen);  // who shares its host sees it
  for (int other : {0, 1, 4, 5}) EXPECT_EQ(members.heard(other, 1), Lines{"3 left: done"}) << other;
  EXPECT_EQ(members.heard(2, 0), Lines{});
  for (int other : {0, 1, 2, 4, 5}) EXPECT_FALSE(members.plane(other).cut_off()) << other;
}

TEST(ControlPlane, WhatItHadAnnouncedComesBeforeItsLeaving) {
  Members members(kThreeHosts);
  members.plane(5).send_up(announce("a"));
  members.plane(2).send_up(announce("a"));
  members.plane(2).leave("done");
  const Lines heard = members.heard(0, 3);
  ASSERT_EQ(heard.size(), 3u);
  const auto at = [&](const std::string& line) { return std::find(heard.begin(), heard.end(), line) - heard.begin(); };
  EXPECT_LT(at("2 announces a"), at("2 left: done"));
  EXPECT_LT(at("5 announces a"), 3);
}

TEST(ControlPlane, WhoeverIsBelowAMemberThatLeftIsCutOff) {
  Members members({1, 1, 1});
  members.plane(0).leave("done");
  for (int other : {1, 2}) {
    EXPECT_EQ(members.heard(other, 1), Lines{"0 left: done"});
    EXPECT_TRUE(members.plane(other).cut_off());
  }
}

TEST(ControlPlane, NothingIsHeldAnyMoreWhenAMemberHasLeft) {
  Members members(kThreeHosts);
  members.plane(5).leave("done");
  EXPECT_EQ(members.heard(2, 1), Lines{"5 left: done"});
  members.heard(0, 1);
  members.plane(2).send_up(announce("a"));
  EXPECT_FALSE(members.plane(2).holds());
  EXPECT_EQ(members.heard(0, 1), Lines{"2 announces a"});
}

}  // namespace
}  // namespace lightcc
