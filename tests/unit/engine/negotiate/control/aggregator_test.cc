// What an aggregator passes up, by script: given these messages at this time, exactly those.
#include "engine/negotiate/control/aggregator.h"
#include "engine/negotiate/control/hold.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <typeinfo>

#include "unit/announcements.h"
#include "base/overloaded.h"
#include "corpus.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr uint64_t kLate = hold::kAggregatorNs;

using test::allreduce;
using test::joining;
Announce announce(const std::string& key, int64_t count = 1) { return {key, allreduce(count)}; }
Batch batch(const std::string& key, uint32_t id, uint32_t generation) { return {{{id, generation, true, key, {}}}}; }

// "0-2,4:a 3:1.2" are positions 0 to 2 and 4, which announce a, and 3, which announces number 1 in its second
// generation.
std::string script_of(const AggregatedRequests& aggregated) {
  std::string text;
  for (const AggregatedRequest& one : aggregated.requests) {
    text += &one == &aggregated.requests[0] ? "" : "+";
    for (size_t i = 0; i < one.positions.size(); i += 2) {
      text += (i ? "," : "") + std::to_string(one.positions[i]);
      if (one.positions[i + 1] > one.positions[i]) text += "-" + std::to_string(one.positions[i + 1]);
    }
    if (auto* cached = std::get_if<CachedRequest>(&one.request))
      text += ":" + std::to_string(cached->id) + "." + std::to_string(cached->generation);
    else
      text += ":" + std::get<Announce>(one.request).key + (std::get<Announce>(one.request).again ? "!" : "");
  }
  return text;
}
std::string script_of(const UpMessage& message) {
  if (auto* query = std::get_if<Query>(&message)) return "who " + query->key;
  if (auto* absence = std::get_if<MembersAbsent>(&message)) return "absent " + absence->key;
  if (auto* refused = std::get_if<Refused>(&message)) return "refused " + refused->key;
  if (auto* report = std::get_if<RankReport>(&message)) return "report " + report->text;
  return "?";
}
std::string script_of(const std::vector<UpFrame>& frames) {
  std::string line;
  for (const UpFrame& frame : frames) {
    line += line.empty() ? "" : " ";
    std::visit(Overloaded{[&](const MemberLeft&) { line += "?"; }, [&](auto& one) { line += script_of(one); }}, frame);
  }
  return line;
}

// The leader of the second of three hosts of four ranks each; member 4, whose children are 5, 6 and 7.
class Leader : public testing::Test {
 protected:
  static Tree tree(int hosts, int each, int member) {
    std::vector<int> leader, ranks(size_t(hosts * each));
    for (int rank = 0; rank < hosts * each; ++rank) leader.push_back(rank / each * each);
    std::iota(ranks.begin(), ranks.end(), 0);
    return Tree(Group(0, ranks, member, Topology::by_leader(leader)));
  }
  std::string passed() { return script_of(aggregator.take_frames()); }
  void from_all(const UpMessage& message) {
    for (int child : {2, Aggregator::kSelf, 0, 1}) aggregator.receive_up(child, message, 0);
  }

  Tree at = tree(3, 4, 4);
  Aggregator aggregator{at};
};

TEST_F(Leader, SpeaksOnceForAll) {
  for (int child : {2, Aggregator::kSelf, 0}) aggregator.receive_up(child, announce("a"), 0);
  EXPECT_EQ(passed(), "");
  aggregator.receive_up(1, announce("a"), 0);
  EXPECT_EQ(passed(), "0-3:a");
  from_all(announce("a"));
  EXPECT_EQ(passed(), "0-3:a") << "and again the next time";
}

TEST_F(Leader, AReportTakesNothingAlong) {
  aggregator.receive_up(0, announce("a"), 0);
  aggregator.receive_up(1, RankReport{6, "well"}, 0);
  aggregator.receive_up(Aggregator::kSelf, RankReport{4, "too"}, 0);
  EXPECT_EQ(passed(), "report well report too");
  for (int child : {1, 2, Aggregator::kSelf}) aggregator.receive_up(child, announce("a"), 0);
  EXPECT_EQ(passed(), "0-3:a");
}

TEST_F(Leader, KeepsApartWhatDiffers) {
  aggregator.receive_up(0, announce("a"), 0);
  aggregator.receive_up(1, announce("a", 2), 0);
  aggregator.receive_up(2, announce("a"), 0);
  aggregator.receive_up(Aggregator::kSelf, announce("a", 2), 0);
  EXPECT_EQ(passed(), "1,3:a+0,2:a");
}

TEST_F(Leader, GathersCachedRequestsUnderTheirNumber) {
  aggregator.receive_down(batch("a", 7, 1));
  from_all(CachedRequest{7, 1});
  EXPECT_EQ(passed(), "0-3:7.1");
  aggregator.receive_up(1, announce("a", 2), 0);  // has changed on one
  for (int child : {0, 2, Aggregator::kSelf}) aggregator.receive_up(child, CachedRequest{7, 1}, 0);
  EXPECT_EQ(passed(), "2:a+0-1,3:7.1") << "one request all the same";
}

TEST_F(Leader, ANumberThatWasGivenAwayIsNotHeld) {
  aggregator.receive_down(batch("a", 7, 1));
  aggregator.receive_up(0, CachedRequest{7, 1}, 0);
  aggregator.receive_up(1, announce("a"), 0);
  EXPECT_EQ(passed(), "");
  aggregator.receive_down(batch("b", 7, 2));
  EXPECT_EQ(passed(), "1:7.1+2:a") << "before anyone below can make it good";
  aggregator.receive_up(2, CachedRequest{7, 1}, 0);
  EXPECT_EQ(passed(), "3:7.1");
  Announce anew = announce("a");
  anew.again = true;
  aggregator.receive_up(0, anew, 0);
  EXPECT_EQ(passed(), "1:a!");
}

TEST_F(Leader, PassesWhatItHasHeldForLong) {
  aggregator.receive_up(0, announce("a"), 0);
  aggregator.receive_up(1, announce("b"), kLate / 2);
  aggregator.pass_expired(kLate - 1);
  EXPECT_EQ(passed(), "");
  aggregator.pass_expired(kLate);
  EXPECT_EQ(passed(), "1:a");
  aggregator.pass_expired(kLate + kLate / 2);
  EXPECT_EQ(passed(), "2:b");
  for (int child : {1, Aggregator::kSelf}) aggregator.receive_up(child, announce("a"), kLate);
  aggregator.pass_expired(2 * kLate - 1);
  EXPECT_EQ(passed(), "");
  aggregator.receive_up(2, announce("a"), kLate);
  EXPECT_EQ(passed(), "0,2-3:a") << "it knows who has spoken before";
}

TEST_F(Leader, QuestionsAndReportsTakeAlongWhatIsHeld) {
  aggregator.receive_up(0, announce("a"), 0);
  aggregator.receive_up(1, Query{"a", 6}, 0);
  EXPECT_EQ(passed(), "1:a who a");
  aggregator.receive_up(1, announce("a"), 0);
  aggregator.receive_up(1, MembersAbsent{"a", "", {0}}, 0);
  EXPECT_EQ(passed(), "2:a absent a");
  aggregator.receive_up(2, announce("a"), 0);
  aggregator.receive_up(1, Refused{"a", "in flight", 6}, 0);
  EXPECT_EQ(passed(), "3:a refused a");
  aggregator.receive_up(0, announce("b"), 0);
  aggregator.pass_all();
  EXPECT_EQ(passed(), "1:b");
}

TEST_F(Leader, HoldsNothingAnyMoreWhenAMemberHasLeft) {
  aggregator.receive_up(0, announce("a"), 0);
  aggregator.member_left();
  EXPECT_EQ(passed(), "1:a");
  aggregator.receive_up(1, announce("a"), 0);
  aggregator.receive_up(Aggregator::kSelf, announce("b"), 0);
  EXPECT_EQ(passed(), "2:a 0:b");
}

TEST_F(Leader, WhoJoinsIsNotWaitedFor) {
  for (int child : {0, 1}) aggregator.receive_up(child, announce("a"), 0);
  aggregator.receive_up(2, announce("b"), 0);
  for (int child : {0, Aggregator::kSelf}) aggregator.receive_up(child, announce("c"), 0);
  aggregator.receive_up(2, Announce{"join.", joining()}, 0);
  EXPECT_EQ(passed(), "3:b 3:join.") << "what it has said comes first";
  aggregator.receive_up(Aggregator::kSelf, announce("a"), 0);
  EXPECT_EQ(passed(), "0-2:a");
  aggregator.receive_up(1, Announce{"join.", joining()}, 0);
  EXPECT_EQ(passed(), "0-1:c 2:join.") << "and so does what was waiting only for it";
  aggregator.receive_down(batch("join.", 3, 1));
  for (int child : {0, Aggregator::kSelf}) aggregator.receive_up(child, announce("d"), 0);
  EXPECT_EQ(passed(), "");
  for (int child : {1, 2}) aggregator.receive_up(child, announce("d"), 0);
  EXPECT_EQ(passed(), "0-3:d");
  aggregator.receive_up(2, CachedRequest{3, 1}, 0);
  EXPECT_EQ(passed(), "3:3.1") << "a join by its number";
  for (int child : {0, 1, Aggregator::kSelf}) aggregator.receive_up(child, announce("d"), 0);
  EXPECT_EQ(passed(), "0-2:d");
}

TEST_F(Leader, AFailureBeginsTheRequestAnew) {
  aggregator.receive_up(0, announce("a"), 0);
  aggregator.pass_all();
  EXPECT_EQ(passed(), "1:a");
  aggregator.receive_down(Failure{"a", Code::mismatch, "why", {5}});
  from_all(announce("a"));
  EXPECT_EQ(passed(), "0-3:a");
}

TEST_F(Leader, ARequestWithAbsentMembersIsNotHeldFromWhoComesLate) {
  aggregator.receive_down(Failure{"a", Code::mismatch, "why", {5, 9}, {9}});
  aggregator.receive_up(0, announce("a"), 0);
  EXPECT_EQ(passed(), "") << "member 5 has failed and begins anew";
  aggregator.receive_up(1, announce("a"), 0);
  EXPECT_EQ(passed(), "2:a") << "member 6 comes to the one that failed";
  aggregator.pass_all();
  EXPECT_EQ(passed(), "1:a");
}

TEST_F(Leader, WhoSpeaksTwicePassesTwice) {
  aggregator.receive_down(Failure{"a", Code::shut_down, "somebody has left", {}, {}});
  aggregator.receive_up(0, announce("a"), 0);  // was on its way when the failure passed
  aggregator.receive_up(0, announce("a"), 0);
  EXPECT_EQ(passed(), "1:a 1:a");
}

TEST_F(Leader, RefusesWhatNobodyBelowMaySay) {
  const auto refused = [&](int child, const auto& message) {
    EXPECT_THROW(aggregator.receive_up(child, message, 0), Error) << typeid(message).name();
  };
  refused(Aggregator::kSelf, AggregatedRequests{});
  for (int member : {5, 4, -1, 12, INT32_MAX, INT32_MIN}) {
    refused(1, Query{"a", member});
    refused(1, Refused{"a", "", member});
    refused(1, BlockedReport{member, 0, 0, Kind::barrier, ""});
    refused(1, DeadlockReply{member, 0, 0, 0, true});
  }
  for (int32_t last : {1, INT32_MAX}) refused(1, AggregatedRequests{{{{0, last}, announce("a")}}});
  refused(1, AggregatedRequests{{{{1, 1}, CachedRequest{9, 9}}}});
  EXPECT_THROW(aggregator.receive_down(Batch{{{4, 1, false, "", {}}}}), Error) << "a number that nobody was told";
}

TEST(Aggregator, GathersWhatOtherAggregatorsHaveGathered) {
  std::vector<int> leader, ranks;
  for (int rank = 0; rank < 40; ++rank) leader.push_back(rank / 2 * 2), ranks.push_back(rank);
  const Tree tree(Group(0, ranks, 2, Topology::by_leader(leader)));  // hosts 9 to 16 hang below host 1
  ASSERT_EQ(tree.subtree.size(), 2u + 8 * 2);
  Aggregator aggregator(tree);
  aggregator.receive_up(Aggregator::kSelf, announce("a"), 0);
  for (int child = 8; child > 1; --child)
    aggregator.receive_up(child, AggregatedRequests{{{{0, 1}, announce("a")}}}, 0);
  aggregator.receive_up(1, AggregatedRequests{{{{1, 1}, announce("a")}}}, 0);
  aggregator.receive_up(0, announce("a"), 0);
  EXPECT_EQ(script_of(aggregator.take_frames()), "");
  aggregator.receive_up(1, AggregatedRequests{{{{0, 0}, announce("a")}}}, 0);
  EXPECT_EQ(script_of(aggregator.take_frames()), "0-17:a");
}

TEST(Aggregator, ARequestCostsAHostTheSameHoweverManyRanksItHas) {
  size_t bytes[2] = {};
  for (int many : {0, 1}) {
    const int each = many ? 64 : 2;
    std::vector<int> leader, ranks;
    for (int rank = 0; rank < 2 * each; ++rank) leader.push_back(rank % 2), ranks.push_back(rank);  // turn by turn
    const Tree tree(Group(0, ranks, 1, Topology::by_leader(leader)));
    Aggregator aggregator(tree);
    size_t messages = 0;
    const auto all_say = [&](const UpMessage& message) {
      for (int child = Aggregator::kSelf; child < each - 1; ++child) aggregator.receive_up(child, message, 0);
      for (const UpFrame& one : aggregator.take_frames()) ++messages, bytes[many] += encode(one).size();
    };
    for (int request = 0; request < 10; ++request) all_say(announce("tensor " + std::to_string(request)));
    for (uint32_t id = 0; id < 10; ++id) {
      aggregator.receive_down(batch("tensor " + std::to_string(id), id, 1));
      all_say(CachedRequest{id, 1});
    }
    EXPECT_EQ(messages, 20u);
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST(AggregatedRequests, IsTakenApartMemberByMember) {
  std::string collected;
  const auto collect = [&](int member, const auto& one) {
    collected += std::to_string(member) + ":" + std::get<Announce>(one).key + " ";
  };
  for_each_request(AggregatedRequests{{{{0, 1, 3, 3}, announce("a")}, {{2, 2}, announce("b")}}}, {4, 6, 9, 1}, collect);
  EXPECT_EQ(collected, "4:a 6:a 1:a 9:b ");
  for (int32_t last : {4, INT32_MAX})
    EXPECT_THROW(for_each_request(AggregatedRequests{{{{0, last}, announce("a")}}}, {4, 6, 9, 1}, collect), Error);
}

// What control_fuzz starts from: streams in its form, of a group of six whose aggregator speaks for members 2, 3 and 4.
struct Line {
  char who, child;
  UpFrame frame;
};
std::string stream_of(const std::vector<Line>& lines) {
  std::string stream;
  for (auto& [who, child, frame] : lines) {
    const std::string bytes = encode(frame);
    stream += {who, child, char(bytes.size() & 255), char(bytes.size() >> 8)};
    stream += bytes;
  }
  return stream;
}
std::vector<Line> all(const UpMessage& message) {
  return {{0, 0, message}, {1, 0, message}, {1, 1, message}, {1, 7, message}, {0, 2, message}, {0, 7, message}};
}
std::map<std::string, std::string> streams() {
  Announcement rows = allreduce(4), splits = rows;
  rows.kind = Kind::allgather;
  splits.kind = Kind::alltoall, splits.splits = {0, 1, 1, 0, 1, 1};
  const auto chain = [](std::vector<std::vector<Line>> requests) {
    std::vector<Line> lines;
    for (auto& one : requests) lines.insert(lines.end(), one.begin(), one.end());
    return stream_of(lines);
  };
  const std::vector<Line> joins = all(Announce{"join.", joining()});
  return {
      {"reduce_and_repeat", chain({all(announce("a")), all(CachedRequest{0, 1}), all(announce("a", 2))})},
      {"gather", chain({all(Announce{"g", rows}), all(CachedRequest{0, 1})})},
      {"exchange", chain({all(Announce{"t", splits}), all(CachedRequest{0, 1})})},
      {"evict", chain({all(announce("a")),
                       all(announce("b")),
                       all(announce("c")),
                       all(CachedRequest{0, 1}),
                       {{1, 0, Announce{"a", allreduce(1), true}}}})},
      {"join", chain({{joins[0], joins[1]}, all(Announce{"g", rows}), {joins[2], joins[3]}, {joins[4]}})},
      {"disagree", chain({{{1, 0, announce("a")}}, all(announce("a", 2))})},
      {"members_absent", chain({{{1, 0, announce("a")}, {1, 0, MembersAbsent{"a", "why", {0}}}}, all(announce("a"))})},
      {"refuse", chain({{{1, 0, announce("a")}, {1, 1, Refused{"a", "why", 4}}}, {{1, 0, Query{"a", 3}}}})},
      {"leave", chain({{{1, 0, announce("a")}, {1, 1, MemberLeft{5, "why"}}}, all(announce("a"))})},
      {"ask", chain({{{1, 0, announce("a")}, {1, 1, Query{"a", 4}}, {0, 1, Query{"a", 3}}}})},
      {"gathered", stream_of({{0, 1, AggregatedRequests{{{{0, 1}, announce("a")}, {{2, 2}, announce("a", 2)}}}}})}};
}

TEST(Aggregator, TheFuzzersCorpusHoldsEveryStream) { lightcc::test::expect_corpus("control_fuzz", streams()); }

}  // namespace
}  // namespace lightcc
