// Disputes by script: given what ranks are blocked on and what they answer, who is asked and who is told.
#include "engine/judge.h"

#include <gtest/gtest.h>

namespace lightcc {
namespace {

// Group 0 is the world of four ranks; 1 is ranks 0 and 1; 2 is ranks 1, 2 and 3.
bool belongs(int rank, int group) { return group == 0 || (group == 1 && rank < 2) || (group == 2 && rank > 0); }
Stuck stuck(int rank, int group, uint32_t state = 1, const std::string& key = "allreduce.x") {
  return {rank, state, group, Kind::allreduce, key};
}
Stuck goes_on(int rank, uint32_t state) { return {rank, state, -1, Kind::barrier, ""}; }

// "0.1?1 in 2" asks rank 0, in its first state, about rank 1 in group 2; "!" for "?" tells it that both have confirmed.
std::string said(Judge& judge) {
  std::string line;
  for (const Accuse& one : judge.take())
    line += (line.empty() ? "" : " ") + std::to_string(one.rank) + "." + std::to_string(one.state) +
            (one.proven ? "!" : "?") + std::to_string(one.other) + " in " + std::to_string(one.group);
  return line;
}

TEST(Judge, TwoThatConfirmAreToldOfEachOther) {
  Judge judge(belongs);
  judge.hear(stuck(1, 1));
  EXPECT_EQ(said(judge), "");
  judge.hear(stuck(0, 0));
  EXPECT_EQ(said(judge), "0.1?1 in 1 1.1?0 in 0");
  judge.hear(Plea{1, 1, 0, 0, true});
  EXPECT_EQ(said(judge), "");
  judge.hear(Plea{0, 1, 1, 1, true});
  EXPECT_EQ(said(judge), "0.1!1 in 1 1.1!0 in 0");
  judge.hear(Plea{0, 1, 1, 1, true});
  EXPECT_EQ(said(judge), "") << "once";
  judge.hear(goes_on(0, 2)), judge.hear(goes_on(1, 2));
  judge.hear(stuck(0, 0, 3)), judge.hear(stuck(1, 1, 3));
  EXPECT_EQ(said(judge), "1.3?0 in 0 0.3?1 in 1") << "they fell into it again";
}

TEST(Judge, NobodyIsAskedAboutWhatIsNoDispute) {
  Judge judge(belongs);
  judge.hear(stuck(0, 0)), judge.hear(stuck(1, 0));
  judge.hear(stuck(2, 2, 1, "allreduce.y"));
  judge.hear({3, 1, 2, Kind::allgather, "allreduce.x"});
  EXPECT_EQ(said(judge), "") << "the same set; other operations";
  judge.hear(stuck(2, 2));
  EXPECT_EQ(said(judge), "2.1?1 in 0 1.1?2 in 2") << "rank 0 is not in group 2";
  judge.hear(goes_on(0, 2));
  judge.hear(stuck(0, 1));
  EXPECT_EQ(said(judge), "") << "rank 2 is not in group 1, and rank 1 is being asked";
}

TEST(Judge, WhoGoesOnIsAskedNoMore) {
  Judge judge(belongs);
  judge.hear(stuck(0, 0)), judge.hear(stuck(1, 1));
  EXPECT_NE(said(judge), "");
  judge.hear(Plea{0, 1, 1, 1, true});
  judge.hear(goes_on(0, 2));
  judge.hear(Plea{1, 1, 0, 0, true});
  EXPECT_EQ(said(judge), "");
  judge.hear(stuck(0, 0, 3));
  EXPECT_EQ(said(judge), "0.3?1 in 1 1.1?0 in 0");
  judge.hear(goes_on(1, 2));
  judge.hear(stuck(1, 1, 2));
  EXPECT_EQ(said(judge), "1.2?0 in 0 0.3?1 in 1");
  judge.hear(Plea{1, 1, 0, 0, true}), judge.hear(Plea{0, 1, 1, 1, true});
  EXPECT_EQ(said(judge), "") << "answers to the question before";
  judge.hear(Plea{1, 2, 0, 1, true});
  EXPECT_EQ(said(judge), "") << "about another group";
  judge.hear(Plea{1, 2, 0, 0, true}), judge.hear(Plea{0, 3, 1, 1, true});
  EXPECT_EQ(said(judge), "0.3!1 in 1 1.2!0 in 0");
}

TEST(Judge, AutomaticNamesDifferBetweenSets) {
  Judge judge(belongs);
  judge.hear(stuck(0, 0, 1, "allreduce.noname.4")), judge.hear(stuck(1, 1, 1, "allreduce.noname.7"));
  const auto asked = judge.take();
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked[0].rank, 1);
  EXPECT_EQ(asked[0].key, "allreduce.noname.4");
  EXPECT_EQ(asked[1].key, "allreduce.noname.7");
}

TEST(Judge, WhoIsLeftBehindIsAskedAboutTheNext) {
  Judge judge(belongs);
  judge.hear(stuck(0, 0)), judge.hear(stuck(1, 1));
  judge.hear(Plea{0, 1, 1, 1, true}), judge.hear(Plea{1, 1, 0, 0, true});
  said(judge);
  judge.hear(goes_on(0, 2));  // before it heard of it
  EXPECT_EQ(said(judge), "");
  judge.hear(stuck(0, 0, 3));
  EXPECT_EQ(said(judge), "0.3?1 in 1 1.1?0 in 0");
}

TEST(Judge, WhoDeniesIsAskedAboutTheNext) {
  Judge judge(belongs);
  judge.hear(stuck(1, 0)), judge.hear(stuck(2, 2)), judge.hear(stuck(3, 2));
  EXPECT_EQ(said(judge), "2.1?1 in 0 1.1?2 in 2");
  judge.hear(Plea{2, 1, 1, 0, false});
  EXPECT_EQ(said(judge), "1.1?3 in 2 3.1?1 in 0");
  judge.hear(Plea{1, 1, 3, 2, true}), judge.hear(Plea{3, 1, 1, 0, true});
  EXPECT_EQ(said(judge), "3.1!1 in 0 1.1!3 in 2");
}

TEST(Judge, AnswersThatNobodyAskedForAreIgnored) {
  Judge judge(belongs);
  judge.hear(Plea{0, 1, 1, 1, true}), judge.hear(goes_on(2, 1));
  judge.hear(stuck(0, 0));
  for (int other : {0, 1, -1, 77, INT32_MAX}) judge.hear(Plea{0, 1, other, 1, true});
  EXPECT_EQ(said(judge), "");
}

}  // namespace
}  // namespace lightcc
