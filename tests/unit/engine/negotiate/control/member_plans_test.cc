// A member's half of fusion plans, by script.
#include "engine/negotiate/control/member_plans.h"

#include <gtest/gtest.h>

#include <map>

#include "unit/announcements.h"
#include "base/overloaded.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using test::allreduce;

// "a" in full, "#0" as a number, "=7.1" bucket 1 of plan 7, "-7" that it has left it.
std::string text_of(const MemberPlans::Messages& messages) {
  std::string text;
  for (const UpMessage& message : messages) {
    text += text.empty() ? "" : " ";
    std::visit(Overloaded{[&](const Announce& m) { text += m.key; },
                          [&](const CachedRequest& m) { text += "#" + std::to_string(m.id); },
                          [&](const BucketReady& m) {
                            text += "=" + std::to_string(m.plan) + "." + std::to_string(m.bucket);
                          },
                          [&](const PlanLeft& m) { text += "-" + std::to_string(m.plan); },
                          [&](const auto&) { text += "?"; }},
               message);
  }
  return text;
}

// Three requests that are remembered: a, b and c as numbers 0, 1 and 2; plan 7 has a and b in a bucket, c in another.
class Planned : public testing::Test {
 protected:
  Planned() {
    uint32_t id = 0;
    for (const char* key : {"a", "b", "c"}) {
      cache.announce(key, allreduce(4));
      std::optional<std::string> again;
      cache.apply({.id = id++, .generation = 1, .fresh = true, .key = key, .rows = {}}, &again);
    }
    plans.begin({7, {{0, 1}, {2}}});
  }
  std::string submit(const std::string& key, uint64_t now_ns = 0) {
    return text_of(plans.submit(key, allreduce(4), 1, now_ns, &slots[key]));
  }
  ResponseCache cache;
  MemberPlans plans{3, cache};
  std::map<std::string, MemberPlans::Slot> slots;
};

TEST_F(Planned, TheLastOfABucketAnnouncesIt) {
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(submit("b"), "");
    EXPECT_TRUE(plans.holds());
    EXPECT_EQ(submit("c"), "=7.1");
    EXPECT_EQ(submit("a"), "=7.0");
    EXPECT_FALSE(plans.holds());
    EXPECT_EQ(plans.run({7, 0}), (std::vector<std::string>{"a", "b"}));
    EXPECT_EQ(plans.run({7, 1}), (std::vector<std::string>{"c"}));
  }
}

TEST_F(Planned, OthersGoByThemselves) {
  EXPECT_EQ(submit("d"), "d");
  EXPECT_FALSE(plans.has("d"));
  EXPECT_TRUE(plans.has("a"));
}

TEST_F(Planned, LeavingAnnouncesWhatIsHeldAndNotWhatIsAnnounced) {
  submit("c");
  submit("b");
  EXPECT_EQ(text_of(plans.leave_with("c")), "#1");
  EXPECT_EQ(submit("a"), "#0");
  EXPECT_EQ(plans.run({7, 1}), (std::vector<std::string>{"c"}));  // all had said so
  EXPECT_EQ(text_of(plans.end({7})), "-7");
}

TEST_F(Planned, APlanThatHoldsNothingIsNotLeftByAWait) {
  submit("c");
  EXPECT_EQ(text_of(plans.leave_with("c")), "");
  submit("a");
  EXPECT_EQ(submit("b"), "=7.0");
  EXPECT_EQ(text_of(plans.leave_with("a")), "");
  EXPECT_TRUE(plans.has("a"));
}

TEST_F(Planned, TheCoordinatorsEndAnnouncesWhatIsHeld) {
  submit("a");
  EXPECT_EQ(text_of(plans.end({7})), "#0 -7");
  EXPECT_EQ(submit("b"), "#1");
  plans.begin({8, {{0, 1, 2}}});
  EXPECT_EQ(submit("a"), "");
  EXPECT_EQ(text_of(plans.leave_all()), "#0");
}

TEST_F(Planned, AnotherShapeLeaves) {
  submit("a");
  MemberPlans::Slot slot;
  EXPECT_EQ(text_of(plans.submit("b", allreduce(5), 1, 0, &slot)), "#0 b");
  EXPECT_FALSE(plans.has("c"));
}

TEST_F(Planned, OneOfNoSetIsNotHeldAndLeaves) {
  submit("a");
  MemberPlans::Slot slot;
  EXPECT_EQ(text_of(plans.submit("b", allreduce(4), 0, 0, &slot)), "#0 #1");
  EXPECT_EQ(slot.plan, 0u);
}

TEST_F(Planned, OneOfAnotherSetLeaves) {  // two functions may give their gradients the same names
  submit("c");
  plans.run({7, 1});
  MemberPlans::Slot slot;
  EXPECT_EQ(text_of(plans.submit("a", allreduce(4), 2, 0, &slot)), "#0");
  EXPECT_FALSE(plans.has("b"));
}

TEST_F(Planned, APlanOfWhatIsAnnouncedOtherwiseMeanwhileIsLeft) {
  plans.end({7});
  EXPECT_EQ(text_of(plans.submit("b", allreduce(5), 1, 0, &slots["b"])), "b");
  plans.begin({8, {{0, 1, 2}}});
  EXPECT_EQ(submit("a"), "#0");
  EXPECT_EQ(text_of(plans.end({8})), "-8");
}

TEST_F(Planned, TimesThatRunBackwardsAreNoTime) {
  submit("a", 1'000'000), submit("b", 0);
  plans.run({7, 0});
  submit("a", 0);
  EXPECT_EQ(text_of(plans.leave_stuck(1'300'000'000)), "");  // as if nobody knew yet how long it takes
  EXPECT_EQ(text_of(plans.leave_stuck(1'300'000'001)), "#0");
}

TEST_F(Planned, APauseIsForgotten) {
  constexpr uint64_t kMs = 1'000'000;
  for (int step = 0; step < 60; ++step) {
    submit("a", 0), submit("b", step == 0 ? 60'000 * kMs : 10 * kMs);
    plans.run({7, 0});
  }
  submit("a", 0);
  EXPECT_EQ(text_of(plans.leave_stuck(500 * kMs)), "#0");
}

TEST_F(Planned, AnotherGroupsPlanOfThatNumberIsAnotherPlan) {
  submit("a"), submit("b");
  EXPECT_EQ(slots["b"].plan, 7u);
  MemberPlans others(3, cache);
  others.begin({7, {{0}, {1}}});
  EXPECT_EQ(text_of(others.submit("b", allreduce(4), 1, 0, &slots["b"])), "=7.1");
}

TEST_F(Planned, WhatIsHeldForMuchLongerThanBeforeIsStuck) {
  constexpr uint64_t kMs = 1'000'000;
  submit("a", 0);
  EXPECT_EQ(text_of(plans.leave_stuck(1000 * kMs)), "");  // nobody knows yet how long it takes
  submit("b", 50 * kMs);
  plans.run({7, 0});
  submit("a", 0);
  EXPECT_EQ(text_of(plans.leave_stuck(500 * kMs)), "");
  EXPECT_EQ(text_of(plans.leave_stuck(501 * kMs)), "#0");
}

TEST_F(Planned, TextNamesBuckets) {
  EXPECT_EQ(plans.text(), "plan 7\n  bucket 0: 2 tensors, a to b\n  bucket 1: 1 tensors, c\n");
}

TEST_F(Planned, WhatNoCoordinatorSaysIsRefused) {
  EXPECT_THROW(plans.run({7, 0}), Error);           // not announced
  EXPECT_THROW(plans.run({7, 2}), Error);
  EXPECT_THROW(plans.run({6, 0}), Error);
  EXPECT_THROW(plans.end({6}), Error);
  EXPECT_THROW(plans.begin({8, {{0}}}), Error);     // it is in a plan
}

}  // namespace
}  // namespace lightcc
