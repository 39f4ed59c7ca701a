// What a relay passes up, by script: given these messages at this time, exactly those.
#include "engine/relay.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

namespace lightcc {
namespace {

constexpr uint64_t kLate = Relay::kHoldNs;

Announcement allreduce(int64_t count) {
  Announcement what;
  what.kind = Kind::allreduce, what.tensors = {{DType::float32, {count}}};
  return what;
}
Announcement joining() {
  Announcement what;
  what.kind = Kind::join;
  return what;
}
Announce announce(const std::string& key, int64_t count = 1) { return {key, allreduce(count)}; }
Batch batch(const std::string& key, uint32_t id, uint32_t generation) { return {{{id, generation, true, key, {}}}}; }

// "0-2,4:a 3:1.2" are places 0 to 2 and 4, which announce a, and 3, which recalls number 1 in its second generation.
std::string script_of(const std::vector<Message>& messages) {
  std::string line;
  for (const Message& message : messages) {
    line += line.empty() ? "" : " ";
    if (auto* said = std::get_if<Said>(&message)) {
      for (const Part& part : said->parts) {
        line += &part == &said->parts[0] ? "" : "+";
        for (size_t i = 0; i < part.places.size(); i += 2) {
          line += (i ? "," : "") + std::to_string(part.places[i]);
          if (part.places[i + 1] > part.places[i]) line += "-" + std::to_string(part.places[i + 1]);
        }
        if (auto* recall = std::get_if<Recall>(&part.said))
          line += ":" + std::to_string(recall->id) + "." + std::to_string(recall->generation);
        else
          line += ":" + std::get<Announce>(part.said).key + (std::get<Announce>(part.said).again ? "!" : "");
      }
    } else if (auto* query = std::get_if<Query>(&message)) {
      line += "who " + query->key;
    } else if (auto* contest = std::get_if<Contest>(&message)) {
      line += "contest " + contest->key;
    } else if (auto* gone = std::get_if<Gone>(&message)) {
      line += "gone " + std::to_string(gone->member);
    } else {
      line += "?";
    }
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
    return {ranks, Topology::by_leader(leader), member};
  }
  std::string said() { return script_of(relay.take()); }
  void all_hear(const Message& message) {
    for (int child : {2, Relay::kSelf, 0, 1}) relay.hear(child, message, 0);
  }

  Tree at = tree(3, 4, 4);
  Relay relay{at};
};

TEST_F(Leader, SpeaksOnceForAll) {
  for (int child : {2, Relay::kSelf, 0}) relay.hear(child, announce("a"), 0);
  EXPECT_EQ(said(), "");
  relay.hear(1, announce("a"), 0);
  EXPECT_EQ(said(), "0-3:a");
  all_hear(announce("a"));
  EXPECT_EQ(said(), "0-3:a") << "and again the next time";
}

TEST_F(Leader, KeepsApartWhatDiffers) {
  relay.hear(0, announce("a"), 0);
  relay.hear(1, announce("a", 2), 0);
  relay.hear(2, announce("a"), 0);
  relay.hear(Relay::kSelf, announce("a", 2), 0);
  EXPECT_EQ(said(), "1,3:a+0,2:a");
}

TEST_F(Leader, GathersRecallsUnderTheirNumber) {
  relay.tell(batch("a", 7, 1));
  all_hear(Recall{7, 1});
  EXPECT_EQ(said(), "0-3:7.1");
  relay.hear(1, announce("a", 2), 0);  // has changed on one
  for (int child : {0, 2, Relay::kSelf}) relay.hear(child, Recall{7, 1}, 0);
  EXPECT_EQ(said(), "2:a+0-1,3:7.1") << "one request all the same";
}

TEST_F(Leader, ANumberThatWasGivenAwayIsNotHeld) {
  relay.tell(batch("a", 7, 1));
  relay.hear(0, Recall{7, 1}, 0);
  relay.hear(1, announce("a"), 0);
  EXPECT_EQ(said(), "");
  relay.tell(batch("b", 7, 2));
  EXPECT_EQ(said(), "1:7.1+2:a") << "before anyone below can make it good";
  relay.hear(2, Recall{7, 1}, 0);
  EXPECT_EQ(said(), "3:7.1");
  Announce anew = announce("a");
  anew.again = true;
  relay.hear(0, anew, 0);
  EXPECT_EQ(said(), "1:a!");
}

TEST_F(Leader, PassesWhatItHasHeldForLong) {
  relay.hear(0, announce("a"), 0);
  relay.hear(1, announce("b"), kLate / 2);
  relay.look(kLate - 1);
  EXPECT_EQ(said(), "");
  relay.look(kLate);
  EXPECT_EQ(said(), "1:a");
  relay.look(kLate + kLate / 2);
  EXPECT_EQ(said(), "2:b");
  for (int child : {1, Relay::kSelf}) relay.hear(child, announce("a"), kLate);
  relay.look(2 * kLate - 1);
  EXPECT_EQ(said(), "");
  relay.hear(2, announce("a"), kLate);
  EXPECT_EQ(said(), "0,2-3:a") << "it knows who has spoken before";
}

TEST_F(Leader, QuestionsAndComplaintsTakeAlongWhatIsHeld) {
  relay.hear(0, announce("a"), 0);
  relay.hear(1, Query{"a", 6}, 0);
  EXPECT_EQ(said(), "1:a who a");
  relay.hear(1, announce("a"), 0);
  relay.hear(1, Contest{"a", "", {0}}, 0);
  EXPECT_EQ(said(), "2:a contest a");
  relay.hear(2, announce("a"), 0);
  relay.hurry();
  EXPECT_EQ(said(), "3:a");
}

TEST_F(Leader, HoldsNothingAnyMoreWhenAMemberHasLeft) {
  relay.hear(0, announce("a"), 0);
  relay.hear(1, Gone{9, ""}, 0);
  EXPECT_EQ(said(), "1:a gone 9");
  relay.gone();
  relay.hear(1, announce("a"), 0);
  relay.hear(Relay::kSelf, announce("b"), 0);
  EXPECT_EQ(said(), "2:a 0:b");
}

TEST_F(Leader, WhoJoinsIsNotWaitedFor) {
  for (int child : {0, 1}) relay.hear(child, announce("a"), 0);
  relay.hear(2, announce("b"), 0);
  for (int child : {0, Relay::kSelf}) relay.hear(child, announce("c"), 0);
  relay.hear(2, Announce{"join.", joining()}, 0);
  EXPECT_EQ(said(), "3:b 3:join.") << "what it has said comes first";
  relay.hear(Relay::kSelf, announce("a"), 0);
  EXPECT_EQ(said(), "0-2:a");
  relay.hear(1, Announce{"join.", joining()}, 0);
  EXPECT_EQ(said(), "0-1:c 2:join.") << "and so does what was waiting only for it";
  relay.tell(batch("join.", 3, 1));
  for (int child : {0, Relay::kSelf}) relay.hear(child, announce("d"), 0);
  EXPECT_EQ(said(), "");
  for (int child : {1, 2}) relay.hear(child, announce("d"), 0);
  EXPECT_EQ(said(), "0-3:d");
  relay.hear(2, Recall{3, 1}, 0);
  EXPECT_EQ(said(), "3:3.1") << "a join by its number";
  for (int child : {0, 1, Relay::kSelf}) relay.hear(child, announce("d"), 0);
  EXPECT_EQ(said(), "0-2:d");
}

TEST_F(Leader, AFailureBeginsTheRequestAnew) {
  relay.hear(0, announce("a"), 0);
  relay.hurry();
  EXPECT_EQ(said(), "1:a");
  relay.tell(Failure{"a", Code::mismatch, "why", {5}});
  all_hear(announce("a"));
  EXPECT_EQ(said(), "0-3:a");
}

TEST_F(Leader, AContestedRequestIsNotHeldFromWhoComesLate) {
  relay.tell(Failure{"a", Code::mismatch, "why", {5, 9}, {9}});
  relay.hear(0, announce("a"), 0);
  EXPECT_EQ(said(), "") << "member 5 has failed and begins anew";
  relay.hear(1, announce("a"), 0);
  EXPECT_EQ(said(), "2:a") << "member 6 comes to the one that failed";
  relay.hurry();
  EXPECT_EQ(said(), "1:a");
}

TEST_F(Leader, WhoSpeaksTwicePassesTwice) {
  relay.tell(Failure{"a", Code::shut_down, "somebody has left", {}, {}});
  relay.hear(0, announce("a"), 0);  // was on its way when the failure passed
  relay.hear(0, announce("a"), 0);
  EXPECT_EQ(said(), "1:a 1:a");
}

TEST_F(Leader, RefusesWhatNobodyBelowMaySay) {
  const auto refused = [&](int child, const Message& message) {
    EXPECT_THROW(relay.hear(child, message, 0), Error) << message.index();
  };
  refused(1, Batch{});
  refused(1, Failure{"a", Code::mismatch, "", {}, {}});
  refused(1, Missing{"a", {}});
  refused(1, Accuse{});
  refused(Relay::kSelf, Said{});
  for (int member : {5, 4, -1, 12, INT32_MAX, INT32_MIN}) {
    refused(1, Query{"a", member});
    refused(1, Stuck{member, 0, 0, Kind::barrier, ""});
    refused(1, Plea{member, 0, 0, 0, true});
  }
  for (int32_t last : {1, INT32_MAX}) refused(1, Said{{{{0, last}, announce("a")}}});
  refused(1, Said{{{{1, 1}, Recall{9, 9}}}});
  EXPECT_THROW(relay.tell(Batch{{{4, 1, false, "", {}}}}), Error) << "a number that nobody was told";
}

TEST(Relay, GathersWhatOtherRelaysHaveGathered) {
  std::vector<int> leader, ranks;
  for (int rank = 0; rank < 40; ++rank) leader.push_back(rank / 2 * 2), ranks.push_back(rank);
  const Tree tree(ranks, Topology::by_leader(leader), 2);  // hosts 9 to 16 hang below host 1
  ASSERT_EQ(tree.subtree.size(), 2u + 8 * 2);
  Relay relay(tree);
  relay.hear(Relay::kSelf, announce("a"), 0);
  for (int child = 8; child > 1; --child) relay.hear(child, Said{{{{0, 1}, announce("a")}}}, 0);
  relay.hear(1, Said{{{{1, 1}, announce("a")}}}, 0);
  relay.hear(0, announce("a"), 0);
  EXPECT_EQ(script_of(relay.take()), "");
  relay.hear(1, Said{{{{0, 0}, announce("a")}}}, 0);
  EXPECT_EQ(script_of(relay.take()), "0-17:a");
}

TEST(Relay, ARequestCostsAHostTheSameHoweverManyRanksItHas) {
  size_t bytes[2] = {};
  for (int many : {0, 1}) {
    const int each = many ? 64 : 2;
    std::vector<int> leader, ranks;
    for (int rank = 0; rank < 2 * each; ++rank) leader.push_back(rank % 2), ranks.push_back(rank);  // turn by turn
    const Tree tree(ranks, Topology::by_leader(leader), 1);
    Relay relay(tree);
    size_t messages = 0;
    const auto all_say = [&](const Message& message) {
      for (int child = Relay::kSelf; child < each - 1; ++child) relay.hear(child, message, 0);
      for (const Message& one : relay.take()) ++messages, bytes[many] += encode(one).size();
    };
    for (int request = 0; request < 10; ++request) all_say(announce("tensor " + std::to_string(request)));
    for (uint32_t id = 0; id < 10; ++id) {
      relay.tell(batch("tensor " + std::to_string(id), id, 1));
      all_say(Recall{id, 1});
    }
    EXPECT_EQ(messages, 20u);
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST(Said, IsTakenApartMemberByMember) {
  std::string heard;
  const auto hear = [&](int member, const auto& said) {
    heard += std::to_string(member) + ":" + std::get<Announce>(said).key + " ";
  };
  each_said(Said{{{{0, 1, 3, 3}, announce("a")}, {{2, 2}, announce("b")}}}, {4, 6, 9, 1}, hear);
  EXPECT_EQ(heard, "4:a 6:a 1:a 9:b ");
  for (int32_t last : {4, INT32_MAX})
    EXPECT_THROW(each_said(Said{{{{0, last}, announce("a")}}}, {4, 6, 9, 1}, hear), Error);
}

// What control_fuzz starts from: streams in its form, of a group of six whose relay speaks for members 2, 3 and 4.
struct Line {
  char who, child;
  Message message;
};
std::string stream_of(const std::vector<Line>& lines) {
  std::string stream;
  for (auto& [who, child, message] : lines) {
    const std::string bytes = encode(message);
    stream += {who, child, char(bytes.size() & 255), char(bytes.size() >> 8)};
    stream += bytes;
  }
  return stream;
}
std::vector<Line> all(const Message& message) {
  return {{0, 0, message}, {1, 0, message}, {1, 1, message}, {1, 7, message}, {0, 2, message}, {0, 7, message}};
}
std::vector<std::pair<const char*, std::string>> streams() {
  Announcement rows = allreduce(4), splits = rows;
  rows.kind = Kind::allgather;
  splits.kind = Kind::alltoall, splits.splits = {0, 1, 1, 0, 1, 1};
  const auto chain = [](std::vector<std::vector<Line>> parts) {
    std::vector<Line> lines;
    for (auto& part : parts) lines.insert(lines.end(), part.begin(), part.end());
    return stream_of(lines);
  };
  const std::vector<Line> joins = all(Announce{"join.", joining()});
  return {{"reduce_and_recall", chain({all(announce("a")), all(Recall{0, 1}), all(announce("a", 2))})},
          {"gather", chain({all(Announce{"g", rows}), all(Recall{0, 1})})},
          {"exchange", chain({all(Announce{"t", splits}), all(Recall{0, 1})})},
          {"evict", chain({all(announce("a")),
                           all(announce("b")),
                           all(announce("c")),
                           all(Recall{0, 1}),
                           {{1, 0, Announce{"a", allreduce(1), true}}}})},
          {"join", chain({{joins[0], joins[1]}, all(Announce{"g", rows}), {joins[2], joins[3]}, {joins[4]}})},
          {"disagree", chain({{{1, 0, announce("a")}}, all(announce("a", 2))})},
          {"contest", chain({{{1, 0, announce("a")}, {1, 0, Contest{"a", "why", {0}}}}, all(announce("a"))})},
          {"leave", chain({{{1, 0, announce("a")}, {1, 1, Gone{5, "why"}}}, all(announce("a"))})},
          {"ask", chain({{{1, 0, announce("a")}, {1, 1, Query{"a", 4}}, {0, 1, Query{"a", 3}}}})},
          {"gathered", stream_of({{0, 1, Said{{{{0, 1}, announce("a")}, {{2, 2}, announce("a", 2)}}}}})}};
}

TEST(Relay, TheFuzzersCorpusHoldsEveryStream) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(__FILE__).parent_path() / "../fuzz/corpus/control_fuzz";
  for (auto& [name, stream] : streams()) {
    if (std::getenv("LIGHTCC_WRITE_CORPUS")) {
      fs::create_directories(folder);
      std::ofstream(folder / name, std::ios::binary) << stream;
    }
    std::ifstream file(folder / name, std::ios::binary);
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), stream)
        << folder / name << " is old: run this test with LIGHTCC_WRITE_CORPUS=1";
  }
}

}  // namespace
}  // namespace lightcc
