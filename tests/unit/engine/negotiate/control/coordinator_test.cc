// Negotiation by script: given these messages, exactly those. No I/O, no clock, no threads.
#include "engine/negotiate/control/coordinator.h"
#include "unit/announcements.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr Coordinator::Limits kLimits{{1 << 20, true}, 100};

using test::allreduce;
Announcement of_kind(Kind kind, Shape shape = {4}) {
  Announcement what;
  what.kind = kind, what.tensors = {{DType::float32, std::move(shape)}};
  if (kind == Kind::alltoall) what.splits = {1, 1, 2};
  return what;
}

// As a line of text: "[a=0.1 b=1.1] [0.1]" is a batch of two fresh requests, numbered 0 and 1 in their first
// generation, and a batch of a known one; "a! why" is a failure.
std::string script_of(const std::vector<DownMessage>& messages) {
  std::string line;
  for (const DownMessage& message : messages) {
    line += line.empty() ? "" : " ";
    if (auto* batch = std::get_if<Batch>(&message)) {
      std::string responses;
      for (const Response& response : batch->responses) {
        responses += responses.empty() ? "" : " ";
        if (response.fresh) responses += response.key + "=";
        responses +=
            response.id == kNoId ? "none" : std::to_string(response.id) + "." + std::to_string(response.generation);
      }
      line += "[" + responses + "]";
    } else if (auto* failure = std::get_if<Failure>(&message)) {
      line += failure->key + "! " + failure->text;
      if (!failure->only.empty()) line += " (only " + text_of(failure->only) + ")";
      if (!failure->absent.empty()) line += " (absent " + text_of(failure->absent) + ")";
    } else if (auto* plan = std::get_if<Plan>(&message)) {
      line += "plan " + std::to_string(plan->plan);
      for (auto& bucket : plan->buckets) line += " (" + text_of(std::vector<int>(bucket.begin(), bucket.end())) + ")";
    } else if (auto* ended = std::get_if<PlanEnded>(&message)) {
      line += "end of plan " + std::to_string(ended->plan);
    } else if (auto* bucket = std::get_if<BucketBatch>(&message)) {
      line += "{" + std::to_string(bucket->plan) + "." + std::to_string(bucket->bucket) + "}";
    } else {
      line += "?";
    }
  }
  return line;
}

void all_announce(Coordinator& coordinator, int size, const std::string& key, const Announcement& what) {
  for (int member = 0; member < size; ++member) coordinator.announce(member, key, what);
}

// ---- what runs, and in which order

TEST(Coordinator, NothingRunsBeforeTheLastMemberHasAnnouncedIt) {
  Coordinator c({4, 7, 9}, kLimits);
  c.announce(2, "a", of_kind(Kind::barrier));
  c.announce(0, "a", of_kind(Kind::barrier));
  EXPECT_FALSE(c.anything_ready());
  EXPECT_EQ(c.missing("a"), std::vector{1});
  EXPECT_EQ(c.missing("never heard of"), (std::vector{0, 1, 2}));
  EXPECT_EQ(script_of(c.take_messages()), "");
  c.announce(1, "a", of_kind(Kind::barrier));
  EXPECT_TRUE(c.anything_ready());
  EXPECT_TRUE(c.missing("a").empty());
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
  EXPECT_FALSE(c.anything_ready());
  EXPECT_EQ(c.missing("a"), (std::vector{0, 1, 2}));
}

TEST(Coordinator, RunsInTheOrderInWhichTheyBecameReady) {
  Coordinator c({0, 1}, kLimits);
  for (const char* key : {"a", "b", "c"}) c.announce(0, key, of_kind(Kind::allgather));
  for (const char* key : {"c", "a", "b"}) c.announce(1, key, of_kind(Kind::allgather));
  EXPECT_EQ(script_of(c.take_messages()), "[c=0.1] [a=1.1] [b=2.1]");
}

TEST(Coordinator, KnowsForWhomTheOthersWaited) {
  Coordinator c({0, 1, 2}, kLimits);
  const auto announce = [&](int member, const char* key, uint64_t now_ns) {
    c.announce(member, key, allreduce(1), false, now_ns);
  };
  announce(0, "a", 100), announce(1, "a", 130), announce(2, "a", 200);  // from 130 on only member 2 is missing
  announce(0, "b", 140), announce(1, "b", 150), announce(2, "b", 220);  // until 200 that is counted
  announce(2, "c", 300), announce(1, "c", 300), announce(0, "c", 310);
  EXPECT_EQ(c.waited_ns(), (std::vector<uint64_t>{10, 0, 90}));
}

TEST(Coordinator, WaitsForNobodyAlone) {
  Coordinator c({0}, kLimits);
  c.announce(0, "a", allreduce(1), false, 100);
  c.announce(0, "b", allreduce(1), false, 200);
  EXPECT_EQ(c.waited_ns(), std::vector<uint64_t>{0});
}

TEST(Coordinator, AnnouncingTwiceIsAFault) {
  Coordinator c({0, 1}, kLimits);
  c.announce(1, "a", allreduce(1));
  EXPECT_THROW(c.announce(1, "a", allreduce(1)), Error);
}

TEST(Coordinator, TellsTheRowsOfEachMember) {
  Coordinator c({0, 1}, kLimits);
  c.announce(0, "g", of_kind(Kind::allgather, {2, 5}));
  c.announce(1, "g", of_kind(Kind::allgather, {7, 5}));
  Announcement x = of_kind(Kind::alltoall, {3}), y = of_kind(Kind::alltoall, {9});
  x.splits = {1, 2}, y.splits = {4, 5};
  c.announce(0, "t", x);
  c.announce(1, "t", y);
  const auto messages = c.take_messages();
  ASSERT_EQ(script_of(messages), "[g=0.1] [t=1.1]");
  using Rows = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(std::get<Batch>(messages[0]).responses[0].rows, (Rows{{2, 7}}));
  EXPECT_EQ(std::get<Batch>(messages[1]).responses[0].rows, (Rows{{1, 2, 4, 5}}));
}

// ---- fusion

TEST(Coordinator, FusesWhatIsReadyTogether) {
  Coordinator c({0, 1}, kLimits);
  for (const char* key : {"a", "b", "c"}) all_announce(c, 2, key, allreduce(10));
  EXPECT_EQ(c.ready_bytes(), 120);
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1 b=1.1 c=2.1]");
  EXPECT_EQ(c.ready_bytes(), 0);
}

TEST(Coordinator, TellsFusionAllThatMayDiffer) {
  Announcement average = allreduce(10), scaled = allreduce(10), rescaled = allreduce(10), mixed = allreduce(10);
  average.op = ReduceOp::average, scaled.pre = 0.5, rescaled.post = 0.5;
  mixed.tensors.push_back({DType::int32, {1}});
  for (const Announcement& other : {average, scaled, rescaled, mixed, allreduce(10, DType::float64),
                                    of_kind(Kind::reducescatter, {10}), of_kind(Kind::broadcast, {10})}) {
    Coordinator c({0, 1}, kLimits);
    all_announce(c, 2, "a", allreduce(10));
    all_announce(c, 2, "b", other);
    all_announce(c, 2, "c", allreduce(10));
    EXPECT_EQ(script_of(c.take_messages()), "[a=0.1 c=1.1] [b=2.1]");
  }
  Coordinator c({0, 1}, kLimits);
  for (const char* key : {"a", "b"}) all_announce(c, 2, key, of_kind(Kind::broadcast));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1] [b=1.1]") << "only reductions are fused";
}

TEST(Coordinator, KeepsToTheLimitsOfFusion) {
  for (const FusionLimits limits : {FusionLimits{79, true}, FusionLimits{1 << 20, false}}) {
    Coordinator c({0, 1}, {limits, 100});
    for (const char* key : {"a", "b"}) all_announce(c, 2, key, allreduce(10));
    EXPECT_EQ(script_of(c.take_messages()), "[a=0.1] [b=1.1]");
  }
}

TEST(Coordinator, WhatLiesSideBySideRunsSideBySide) {
  Coordinator c({0, 1}, kLimits);
  c.set_own("a", 3000), c.set_own("b", 1000), c.set_own("d", 2000);
  for (const char* key : {"a", "b", "c", "d"}) all_announce(c, 2, key, allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[b=0.1 d=1.1 a=2.1] [c=3.1]") << "by address; private memory on its own";
}

// ---- the cache

TEST(Coordinator, WhatAllHaveCachedIsToldByNumber) {
  Coordinator c({0, 1}, kLimits);
  all_announce(c, 2, "a", allreduce(10));
  all_announce(c, 2, "b", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1 b=1.1]");
  for (int member : {1, 0}) c.announce_cached(member, {1, 1});
  EXPECT_EQ(c.ready_bytes(), 40);
  EXPECT_EQ(script_of(c.take_messages()), "[1.1]");
}

TEST(Coordinator, AChangedRequestKeepsItsNumberInANewGeneration) {
  Coordinator c({0, 1}, kLimits);
  all_announce(c, 2, "a", of_kind(Kind::allgather, {1, 3}));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
  c.announce_cached(0, {0, 1});
  c.announce(1, "a", of_kind(Kind::allgather, {5, 3}));
  const auto messages = c.take_messages();
  EXPECT_EQ(script_of(messages), "[a=0.2]");
  EXPECT_EQ(std::get<Batch>(messages[0]).responses[0].rows[0], (std::vector<int64_t>{1, 5}));
}

TEST(Coordinator, ANumberThatWasGivenAwayIsIgnored) {
  Coordinator c({0, 1}, {{1 << 20, true}, 1});
  all_announce(c, 2, "a", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
  all_announce(c, 2, "b", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[b=0.2]");
  c.announce_cached(1, {0, 1});    // was on its way when the number went to b
  c.announce_cached(1, {100, 1});  // no such number
  EXPECT_EQ(c.missing("b"), (std::vector{0, 1}));
  all_announce(c, 2, "a", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.3]");
}

TEST(Coordinator, TheLongestUnusedIsEvictedButNothingInFlight) {
  Coordinator c({0, 1}, {{1 << 20, false}, 2});
  all_announce(c, 2, "a", allreduce(1));
  all_announce(c, 2, "b", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1] [b=1.1]");
  c.announce_cached(0, {0, 1});  // a is in flight, so b must give way although it was used later
  all_announce(c, 2, "c", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[c=1.2]");
  c.announce_cached(0, {1, 2});  // and now both are
  all_announce(c, 2, "d", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[d=none]");
  c.announce_cached(1, {1, 2});
  c.announce_cached(1, {0, 1});
  EXPECT_EQ(script_of(c.take_messages()), "[1.2] [0.1]");
}

TEST(Coordinator, WithoutACacheNothingIsNumbered) {
  Coordinator c({0, 1}, {{1 << 20, true}, 0});
  for (int again = 0; again < 2; ++again) {
    all_announce(c, 2, "a", allreduce(10));
    EXPECT_EQ(script_of(c.take_messages()), "[a=none]");
  }
}

// ---- disagreement: what it says, disagreement_test.cc tests

TEST(Coordinator, ADisagreementIsAFailureAndTheNextOneWorks) {
  Coordinator c({4, 7, 9}, kLimits);
  c.announce(2, "a", allreduce(1));
  c.announce(0, "a", allreduce(2));
  EXPECT_FALSE(c.anything_ready());
  c.announce(1, "a", allreduce(3));
  EXPECT_TRUE(c.anything_ready());
  const auto messages = c.take_messages();
  EXPECT_EQ(script_of(messages), "a! ranks disagree on shape: rank 4 has [2], rank 7 has [3], rank 9 has [1]");
  EXPECT_EQ(std::get<Failure>(messages[0]).code, Code::mismatch);
  all_announce(c, 3, "a", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
}

TEST(Coordinator, ADisagreementAfterCachingIsFoundAndHealed) {
  Coordinator c({0, 1}, kLimits);
  all_announce(c, 2, "a", allreduce(10));
  all_announce(c, 2, "b", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1 b=1.1]");
  c.announce_cached(0, {0, 1});
  c.announce(1, "a", allreduce(11));
  for (int member : {0, 1}) c.announce_cached(member, {1, 1});
  EXPECT_EQ(script_of(c.take_messages()), "a! ranks disagree on shape: rank 0 has [10], rank 1 has [11] [1.1]");
  all_announce(c, 2, "a", allreduce(11));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.2]");
}

// ---- members that will not come

TEST(Coordinator, WhatAMemberThatLeftHasNotAnnouncedFailsNowAndLater) {
  Coordinator c({0, 1, 2}, kLimits);
  all_announce(c, 3, "complete", allreduce(1));
  for (int member : {0, 1}) c.announce(member, "waiting", allreduce(1));
  for (int member : {0, 2}) c.announce(member, "announced by it", allreduce(1));
  c.member_left(2, "rank 2 has left");
  EXPECT_TRUE(c.anything_urgent());
  auto messages = c.take_messages();
  EXPECT_EQ(script_of(messages), "waiting! rank 2 has left [complete=0.1]");
  EXPECT_EQ(std::get<Failure>(messages[0]).code, Code::shut_down);
  c.announce(1, "announced by it", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[announced by it=1.1]");
  c.announce(0, "new", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "new! rank 2 has left");
  c.announce_cached(1, {0, 1});
  EXPECT_EQ(script_of(c.take_messages()), "complete! rank 2 has left");
}

// Of messages that withdraw names, and no others.
std::vector<std::string> withdrawn_in(const std::vector<DownMessage>& messages) {
  std::vector<std::string> names;
  for (const DownMessage& message : messages) {
    const NameWithdrawn& one = std::get<NameWithdrawn>(message);
    names.push_back(one.key + ": " + one.text);
  }
  return names;
}

TEST(Coordinator, RemembersWhoRefusedARequestUntilItComes) {
  Coordinator c({0, 1, 2}, kLimits);
  c.announce(0, "a", allreduce(1));
  c.refused(0, "a", "in flight");
  EXPECT_EQ(c.refusal(0, "a"), "in flight");
  for (int member : {1, 2}) {
    c.announce(member, "a", allreduce(1));
    EXPECT_EQ(c.refusal(member, "a"), "");
  }
  c.take_messages();
  c.announce_cached(1, {0, 1});
  EXPECT_EQ(c.missing("a"), (std::vector<int>{0, 2}));
  EXPECT_EQ(c.refusal(0, "a"), "in flight") << "it is the second that it refused";
  EXPECT_EQ(c.refusal(2, "a"), "");
  c.announce_cached(0, {0, 1});
  EXPECT_EQ(c.refusal(0, "a"), "");
}

TEST(Coordinator, WhatAllHaveRefusedIsForgotten) {
  Coordinator c({0, 1, 2}, kLimits);
  for (int member : {0, 0, 1, 2}) c.refused(member, "a", "in flight");
  EXPECT_EQ(c.refusal(0, "a"), "in flight") << "twice";
  EXPECT_EQ(c.refusal(1, "a"), "");
  for (int member : {1, 2}) c.refused(member, "a", "in flight");
  for (int member : {0, 1, 2}) EXPECT_EQ(c.refusal(member, "a"), "");
}

// The name of two threads.
TEST(Coordinator, WithdrawsAContendedNameAndDropsWhatWasAnnouncedBefore) {
  Coordinator c({0, 1}, kLimits);
  c.announce(0, "a", allreduce(1));
  c.contended(0, "a");
  c.contended(1, "a");  // said before it heard
  EXPECT_EQ(withdrawn_in(c.take_messages()), (std::vector<std::string>{"a: " + why_withdrawn(0)}));
  c.announce(1, "a", allreduce(1));  // before it heard: it fails there
  EXPECT_FALSE(c.anything_ready());
  c.name_given_up(1, "a");
  c.announce(1, "a", allreduce(1));  // after a barrier
  c.name_given_up(0, "a");
  EXPECT_EQ(c.missing("a"), std::vector<int>{0});
  c.announce(0, "a", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
  EXPECT_THROW(c.name_given_up(0, "a"), Error);
}

TEST(Coordinator, WithdrawsAContendedNameThatIsReadyOrPlanned) {
  Coordinator c({0, 1}, kLimits);
  for (int member : {0, 1}) c.announce(member, "a", allreduce(1));
  EXPECT_EQ(c.ready_bytes(), 4);
  c.contended(1, "a");
  EXPECT_EQ(c.ready_bytes(), 0);
  EXPECT_EQ(withdrawn_in(c.take_messages()), (std::vector<std::string>{"a: " + why_withdrawn(1)}));
  c.name_given_up(0, "a");
  c.contended(0, "a");  // anew, before the other has answered the first
  EXPECT_EQ(withdrawn_in(c.take_messages()), (std::vector<std::string>{"a: " + why_withdrawn(0)}));
  c.name_given_up(1, "a");
  c.announce(1, "a", allreduce(1));
  c.name_given_up(1, "a");
  c.name_given_up(0, "a");
  EXPECT_EQ(c.missing("a"), (std::vector<int>{0, 1})) << "announced before the second withdrawal was heard";
}

TEST(Coordinator, KnowsWhatAMemberWaitsForItself) {
  Coordinator c({0, 1, 2}, kLimits);
  EXPECT_EQ(c.waits_for(1), "");
  c.announce(0, "a", allreduce(1));
  c.announce(1, "b", allreduce(1));
  c.announce(1, "c", allreduce(1));
  EXPECT_EQ(c.waits_for(0), "a");
  EXPECT_EQ(c.waits_for(1), "b") << "the first of two";
  EXPECT_EQ(c.waits_for(2), "");
  for (int member : {0, 2}) c.announce(member, "b", allreduce(1));
  c.take_messages();
  EXPECT_EQ(c.waits_for(1), "c") << "b has run";
}

TEST(Coordinator, AnAbsenceFailsItForEachAsItComes) {
  Coordinator c({0, 1, 2, 3}, kLimits);
  c.announce(0, "a", allreduce(1));
  c.members_absent({"a", "rank 1 gave it to process set 2", {1}});
  EXPECT_EQ(script_of(c.take_messages()), "a! rank 1 gave it to process set 2 (only 0, 1) (absent 1)");
  for (int member : {2, 3}) {
    c.announce(member, "a", allreduce(1));
    EXPECT_EQ(script_of(c.take_messages()), "a! rank 1 gave it to process set 2 (only " + std::to_string(member) + ")");
  }
  all_announce(c, 4, "a", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
  c.members_absent({"a", "too late", {1}});
  c.members_absent({"never heard of", "too late", {1}});
  EXPECT_FALSE(c.anything_ready());
}

TEST(Coordinator, WhoAlsoStaysAwayIsOwedNothing) {
  Coordinator c({0, 1, 2, 3}, kLimits);
  c.announce(0, "a", allreduce(1));
  c.members_absent({"a", "why", {1}});
  EXPECT_EQ(script_of(c.take_messages()), "a! why (only 0, 1) (absent 1)");
  c.announce(0, "a", allreduce(1));  // the next one
  c.members_absent({"a", "so do I", {2}});
  EXPECT_EQ(script_of(c.take_messages()), "a! so do I (only 2) (absent 2)");
  for (int member : {1, 2}) c.announce(member, "a", allreduce(1));
  c.announce(3, "a", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "a! why (only 3)") << "it comes to the first one";
  c.announce(3, "a", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
}

// ---- members that have joined

void join(Coordinator& coordinator, int member) {
  Announcement what;
  what.kind = Kind::join;
  coordinator.announce(member, "join.", what);
}
Response only_response(const std::vector<DownMessage>& messages) {
  EXPECT_EQ(messages.size(), 1u) << script_of(messages);
  return std::get<Batch>(messages.at(0)).responses.at(0);
}

TEST(Coordinator, NothingWaitsForAMemberThatHasJoined) {
  Coordinator c({4, 7, 9}, kLimits);
  for (int member : {0, 2}) c.announce(member, "a", allreduce(10));
  join(c, 1);
  EXPECT_EQ(c.joined(), std::vector{1});
  EXPECT_EQ(c.ready_bytes(), 40);
  auto messages = c.take_messages();
  EXPECT_EQ(script_of(messages), "[a=0.1]");
  EXPECT_EQ(only_response(messages).absent, std::vector{1});
  EXPECT_EQ(only_response(messages).what, allreduce(10));
  c.announce(2, "b", allreduce(1));
  EXPECT_EQ(c.missing("b"), std::vector{0});
  EXPECT_EQ(c.missing("join."), (std::vector{0, 2}));
  EXPECT_FALSE(c.anything_ready());
}

TEST(Coordinator, WhenAllHaveJoinedWhatWaitsRunsBeforeTheEnd) {
  Coordinator c({4, 7}, kLimits);
  c.announce(1, "b", allreduce(10));
  c.announce(0, "a", allreduce(10));
  join(c, 1);
  join(c, 0);
  EXPECT_TRUE(c.joined().empty());
  auto messages = c.take_messages();
  EXPECT_EQ(script_of(messages), "[a=0.1] [b=1.1] [join.=2.1]") << "other members are absent: never fused";
  EXPECT_EQ(std::get<Batch>(messages[0]).responses[0].absent, std::vector{1});
  EXPECT_EQ(std::get<Batch>(messages[1]).responses[0].absent, std::vector{0});
  EXPECT_EQ(std::get<Batch>(messages[2]).responses[0].rows, (std::vector<std::vector<int64_t>>{{4}})) << "the last";
  c.announce(1, "a", allreduce(10));
  EXPECT_FALSE(c.anything_ready()) << "who has joined counts again";
  join(c, 0);
  EXPECT_EQ(only_response(c.take_messages()).absent, std::vector{0});
  join(c, 1);
  EXPECT_EQ(only_response(c.take_messages()).rows, (std::vector<std::vector<int64_t>>{{7}}));
}

TEST(Coordinator, TheCacheAndFusionWorkWithoutTheAbsent) {
  Coordinator c({0, 1, 2}, kLimits);
  for (const char* key : {"a", "b"}) all_announce(c, 3, key, allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1 b=1.1]");
  join(c, 0);  // its place in shared memory is still known
  const auto run_cached = [&](std::vector<int> members, uint32_t generation) {
    for (uint32_t id : {0, 1})
      for (int member : members) c.announce_cached(member, {id, generation});
    return script_of(c.take_messages());
  };
  EXPECT_EQ(run_cached({1, 2}, 1), "[a=0.2 b=1.2]") << "who is absent is news";
  EXPECT_EQ(run_cached({1, 2}, 2), "[0.2 1.2]");
  join(c, 2);
  EXPECT_EQ(run_cached({1}, 2), "[a=0.3 b=1.3]");
  join(c, 1);
  EXPECT_EQ(script_of(c.take_messages()), "[join.=2.1]");
  EXPECT_EQ(run_cached({0, 1, 2}, 3), "[a=0.4 b=1.4]");
  EXPECT_EQ(run_cached({0, 1, 2}, 4), "[0.4 1.4]");
}

TEST(Coordinator, TheAbsentHaveNoRows) {
  using Rows = std::vector<std::vector<int64_t>>;
  Coordinator c({0, 1, 2}, kLimits);
  join(c, 1);
  c.announce(0, "g", of_kind(Kind::allgather, {2, 5}));
  c.announce(2, "g", of_kind(Kind::allgather, {7, 5}));
  const Response gather = only_response(c.take_messages());
  EXPECT_EQ(gather.rows, (Rows{{2, 0, 7}}));
  EXPECT_EQ(gather.what, of_kind(Kind::allgather, {0, 5}));
  for (int member : {0, 2}) c.announce(member, "t", of_kind(Kind::alltoall, {4}));
  const Response exchange = only_response(c.take_messages());
  EXPECT_EQ(exchange.rows, (Rows{{1, 1, 2, 0, 0, 0, 1, 1, 2}}));
  EXPECT_EQ(exchange.what.splits, Shape(3, 0));
  EXPECT_EQ(exchange.what.tensors[0].shape, Shape{0});
}

TEST(Coordinator, WhatNeedsTheAbsentFailsOnTheOthers) {
  Coordinator c({4, 7, 9}, kLimits);
  join(c, 1);
  Announcement from_7 = of_kind(Kind::broadcast), from_9 = from_7;
  from_7.root = 7, from_9.root = 9;
  for (int again = 0; again < 2; ++again) {
    for (int member : {0, 2}) c.announce(member, "a", from_7);
    EXPECT_EQ(script_of(c.take_messages()),
              "a! root rank 7 has joined and has no more data: broadcast from a rank that has "
              "some, or after join() (only 0, 2)");
    for (int member : {0, 2}) c.announce(member, "a", from_9);
    EXPECT_EQ(only_response(c.take_messages()).absent, std::vector{1});
  }
  for (int member : {0, 2}) c.announce(member, "add", of_kind(Kind::add_group, {0, 1}));
  EXPECT_EQ(script_of(c.take_messages()),
            "add! all ranks of the job must call it, but rank 7 has joined and takes part in "
            "nothing new until all ranks have called join() (only 0, 2)");
  c.announce(0, "a", from_9), c.announce(2, "a", from_7);
  EXPECT_EQ(script_of(c.take_messages()), "a! ranks disagree on root rank: rank 4 has 9, rank 9 has 7 (only 0, 2)");
}

TEST(Coordinator, ANumberThatWasGivenAwayIsAnnouncedInFullBeforeItsMemberJoins) {
  Coordinator c({0, 1}, {{1 << 20, true}, 1});
  all_announce(c, 2, "a", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
  all_announce(c, 2, "b", allreduce(10));
  EXPECT_EQ(script_of(c.take_messages()), "[b=0.2]");
  c.announce_cached(1, {0, 1});  // of a, made before it knew
  join(c, 1);
  EXPECT_TRUE(c.joined().empty());
  c.announce(0, "a", allreduce(10));
  EXPECT_FALSE(c.anything_ready()) << "its data would be lost";
  c.announce(1, "a", allreduce(10), true);
  EXPECT_TRUE(only_response(c.take_messages()).absent.empty());
  EXPECT_EQ(c.joined(), std::vector{1});
  c.announce(0, "a", allreduce(10));
  EXPECT_EQ(only_response(c.take_messages()).absent, std::vector{1});
}

TEST(Coordinator, AJoinFailsWhenAMemberLeaves) {
  Coordinator c({0, 1, 2}, kLimits);
  join(c, 1);
  c.member_left(2, "rank 2 has left");
  EXPECT_EQ(script_of(c.take_messages()), "join.! rank 2 has left");
  join(c, 0);
  EXPECT_EQ(script_of(c.take_messages()), "join.! rank 2 has left");
}

TEST(Coordinator, WhatIsReadyWithoutTheAbsentIsNotFailedAnyMore) {
  Coordinator c({0, 1, 2}, kLimits);
  join(c, 1);
  for (int member : {0, 2}) c.announce(member, "a", allreduce(10));
  c.members_absent({"a", "too late", {1}});
  c.member_left(1, "rank 1 has left");
  EXPECT_EQ(script_of(c.take_messages()), "[a=0.1]");
}

TEST(Coordinator, AFailureThatWaitsForAMemberEndsWhenItJoins) {
  Coordinator c({0, 1, 2}, kLimits);
  c.announce(0, "a", allreduce(1));
  c.members_absent({"a", "why", {1}});
  EXPECT_EQ(script_of(c.take_messages()), "a! why (only 0, 1) (absent 1)");
  for (int member : {0, 1, 2}) join(c, member);  // 2 never came to it
  EXPECT_EQ(script_of(c.take_messages()), "[join.=0.1]");
  all_announce(c, 3, "a", allreduce(1));
  EXPECT_EQ(script_of(c.take_messages()), "[a=1.1]");
}

// ---- fusion plans

// Members 0 and 1, and requests a, b and c of a set, as numbers 0, 1 and 2.
class PlannedSet : public testing::Test {
 protected:
  PlannedSet() { EXPECT_EQ(step(), "[a=0.1 b=1.1 c=2.1]"); }
  void say(int member, const std::string& keys) {
    for (char key : keys) {
      if (member == 0) c.set_own(std::string(1, key), 0, 5);
      if (steps == 0)
        c.announce(member, std::string(1, key), allreduce(4), false, now += 1000);
      else
        c.announce_cached(member, {uint32_t(key - 'a'), 1}, now += 1000);
    }
  }
  std::string step() {
    say(0, "abc"), say(1, "abc");
    ++steps;
    return script_of(c.take_messages());
  }
  void plan() {
    EXPECT_EQ(step(), "[0.1 1.1 2.1]");
    EXPECT_EQ(step(), "plan 1 (0, 1, 2) [0.1 1.1 2.1]");
  }
  Coordinator c{{0, 1}, kLimits};
  int steps = 0;
  uint64_t now = 0;
};

TEST_F(PlannedSet, ThreeEqualStepsMakeAPlan) {
  plan();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(c.announce_bucket(1, {1, 0}), (std::vector<std::string>{"a", "b", "c"}));
    EXPECT_FALSE(c.anything_ready());
    EXPECT_EQ(c.missing("b"), std::vector{0});
    EXPECT_EQ(c.waits_for(1).size(), 1u);
    c.announce_bucket(0, {1, 0});
    EXPECT_TRUE(c.anything_urgent());
    EXPECT_EQ(script_of(c.take_messages()), "{1.0}");
  }
}

TEST_F(PlannedSet, WhoSpeaksByItselfEndsIt) {
  plan();
  c.announce_bucket(0, {1, 0});
  say(1, "b");
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1 [1.1]");
  say(1, "ac");
  EXPECT_EQ(script_of(c.take_messages()), "[0.1 2.1]");
}

TEST_F(PlannedSet, WordsThatComeLateCountAsRequests) {
  plan();
  say(1, "abc");
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1");
  c.announce_bucket(0, {1, 0});
  EXPECT_EQ(script_of(c.take_messages()), "[0.1 1.1 2.1]");
  c.plan_left(0, 1), c.plan_left(1, 1);
  EXPECT_THROW(c.announce_bucket(0, {1, 0}), Error);
}

TEST_F(PlannedSet, ABucketThatIsAgreedAndNotSentYetRunsByItsRequests) {
  plan();
  c.announce_bucket(0, {1, 0}), c.announce_bucket(1, {1, 0});
  c.member_left(1, "it left");
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1 [0.1 1.1 2.1]");
}

TEST_F(PlannedSet, AnotherRequestOfTheSetEndsIt) {
  plan();
  c.set_own("d", 0, 5);
  c.announce(0, "d", allreduce(4));
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1");
}

TEST_F(PlannedSet, WhoJoinsEndsItAndNoneIsMadeMeanwhile) {
  plan();
  c.announce_bucket(0, {1, 0});
  c.announce(1, "join.", of_kind(Kind::join));
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1 [a=0.2 b=1.2 c=2.2]");
}

TEST_F(PlannedSet, AJoinThatWaitsForAnAnnouncementEndsItWhenItIsDue) {
  EXPECT_EQ(step(), "[0.1 1.1 2.1]");
  c.announce_cached(1, {7, 1});  // a number that had been given away: its announcement in full comes after the join
  say(1, "abc");
  c.announce(1, "join.", of_kind(Kind::join));
  say(0, "abc");
  EXPECT_EQ(script_of(c.take_messages()), "plan 1 (0, 1, 2) [0.1 1.1 2.1]");
  c.announce_bucket(0, {1, 0});
  c.announce(1, "x", allreduce(4), true);
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1 [a=0.2 b=1.2 c=2.2]");
}

TEST_F(PlannedSet, WhatIsAgreedIsMissingNowhere) {
  plan();
  c.announce_bucket(0, {1, 0}), c.announce_bucket(1, {1, 0});
  EXPECT_TRUE(c.missing("b").empty());
  EXPECT_EQ(c.waits_for(0), "");
}

TEST_F(PlannedSet, ARefusalEndsIt) {
  plan();
  c.announce_bucket(0, {1, 0});
  c.refused(1, "b", "why");
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1");
}

TEST_F(PlannedSet, AMemberThatLeavesEndsItForThoseThatWait) {
  plan();
  c.announce_bucket(0, {1, 0});
  c.member_left(1, "it left");
  const std::string said = script_of(c.take_messages());
  EXPECT_EQ(said.substr(0, 13), "end of plan 1");
  for (const char* failure : {"a! it left", "b! it left", "c! it left"}) EXPECT_NE(said.find(failure), said.npos);
}

TEST_F(PlannedSet, AfterThreeEqualStepsThereIsAnother) {
  plan();
  for (uint64_t i = 0; i < kServedSteps; ++i) {
    c.announce_bucket(0, {1, 0}), c.announce_bucket(1, {1, 0});
    c.take_messages();
  }
  say(0, "a");
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1");
  c.plan_left(0, 1), c.plan_left(1, 1);
  say(0, "bc"), say(1, "abc");
  EXPECT_EQ(script_of(c.take_messages()), "[0.1 1.1 2.1]");
  EXPECT_EQ(step(), "[0.1 1.1 2.1]");
  EXPECT_EQ(step(), "plan 2 (0, 1, 2) [0.1 1.1 2.1]");
}

TEST_F(PlannedSet, ASetOfAnotherNumberEndsIt) {  // a function that was traced again has the same names
  plan();
  c.set_own("b", 0, 6);
  EXPECT_EQ(script_of(c.take_messages()), "end of plan 1");
}

TEST_F(PlannedSet, WhatNoMemberSaysIsRefused) {
  plan();
  EXPECT_THROW(c.announce_bucket(0, {1, 1}), Error);
  EXPECT_THROW(c.announce_bucket(0, {2, 0}), Error);
  EXPECT_THROW(c.plan_left(0, 1), Error);
  c.announce_bucket(0, {1, 0});
  EXPECT_THROW(c.announce_bucket(0, {1, 0}), Error);
}

TEST(Coordinator, PlansOfSetsThatDoNotComeAgainGiveTheirNumbersUp) {
  Coordinator c({0}, {{1 << 20, true}, 4});
  for (int set = 1; set < 20; ++set)
    for (int step = 0; step < 5; ++step) {
      for (int i = 0; i < 3; ++i) {
        const std::string key = std::to_string(set) + "." + std::to_string(i);
        c.set_own(key, 0, set);
        c.announce(0, key, allreduce(1));
      }
      for (const DownMessage& message : c.take_messages())
        if (auto* ended = std::get_if<PlanEnded>(&message)) c.plan_left(0, ended->plan);
      if (testing::Test::HasFailure()) return;
    }
  EXPECT_LE(c.plans(), 1u);
}

}  // namespace
}  // namespace lightcc
