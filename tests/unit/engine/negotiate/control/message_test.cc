// Control messages: each alternative survives the way there and back; bytes that no encode writes are refused.
#include "engine/negotiate/control/message.h"

#include <gtest/gtest.h>

#include <map>

#include "corpus.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

Announcement announcement() {
  return {Kind::alltoall, ReduceOp::max, 3, 0.5, -2.0, {CodecKind::topk, DType::float16, 0.25, 0.5},
          {{DType::bfloat16, {2, 3}}, {DType::boolean, {}}, {DType::float64, {0}}}, {1, 0, 5}, DeviceKind::cuda};
}

// A frame of either direction as it travels. Parsed and encoded anew it must be the same.
struct Sample {
  Sample(const char* name, const UpFrame& frame) : name(name), up(true), bytes(encode(frame)) {}
  Sample(const char* name, const DownFrame& frame) : name(name), up(false), bytes(encode(frame)) {}
  const char* name;
  bool up;
  std::string bytes;
};
std::string anew(bool up, const std::string& bytes) {
  constexpr int kSender = 7;
  return up ? encode(parse_up(bytes, kSender)) : encode(parse_down(bytes, kSender));
}
constexpr int kMemberLeft = 8;  // the first byte of the only frame that travels both ways
constexpr int kTags = 21;

// One of each kind, and each again at its borders; named as the files of the fuzzer's corpus are.
std::vector<Sample> samples() {
  return {{"announce", Announce{"alltoall.x", announcement()}},
          {"announce_barrier", Announce{"barrier.", {}}},
          {"announce_again", Announce{"alltoall.x", announcement(), true}},
          {"cached_request", CachedRequest{7, 3}},
          {"cached_request_none", CachedRequest{kNoId, 0}},
          {"query", Query{"allreduce.grad"}},
          {"members_absent", MembersAbsent{"allreduce.x", "ranks disagree on the process set", {1, 3}}},
          {"batch", Batch{{{4, 9, false, "", {}}, {5, 1, true, "allgather.y", {{1, 2, 3}, {0, 0, 9}}}}}},
          {"batch_absent", Batch{{{5, 2, true, "alltoall.x", {{1, 0}}, {1, 2}, announcement()}}}},
          {"batch_unnumbered", Batch{{{kNoId, 0, true, "broadcast.z", {}}}}},
          {"batch_empty", Batch{}},
          {"failure", Failure{"allreduce.x", Code::mismatch, "ranks disagree", {}, {}}},
          {"failure_for_some", Failure{"allreduce.x", Code::shut_down, "", {0, 1}, {2}}},
          {"missing", Missing{"allreduce.x", {0, 2}}},
          {"missing_joined", Missing{"allreduce.x", {0, 2}, {1}}},
          {"missing_nobody", Missing{"", {}}},
          {"missing_blocked", Missing{"allreduce.x", {0, 2}, {}, 0, "", true}},
          {"missing_far_away", Missing{"allreduce.x", {1}, {}, 5}},
          {"missing_with_note", Missing{"allreduce.x", {1}, {}, 2, "rank 1 refused it"}},
          {"refused", Refused{"allreduce.x", "one of this name is still in flight", 3}},
          {"contended", Contended{"allreduce.x", 3}},
          {"name_given_up", NameGivenUp{"allreduce.x", 2}},
          {"name_withdrawn", NameWithdrawn{"allreduce.x", "two threads of rank 3"}},
          {"query_far_away", Query{"allreduce.grad", 5}},
          {"query_blocked", Query{"allreduce.grad", 5, true}},
          {"aggregated",
           AggregatedRequests{{{{0, 3}, Announce{"alltoall.x", announcement()}}, {{5, 5, 7, 8}, CachedRequest{7, 3}}}}},
          {"aggregated_cached", AggregatedRequests{{{{1, 4}, CachedRequest{0, 1}}}}},
          {"aggregated_nothing", AggregatedRequests{}},
          {"member_left", UpFrame(MemberLeft{2, "rank 2 has left"})},
          {"member_left", DownFrame(MemberLeft{2, "rank 2 has left"})},
          {"blocked_report", BlockedReport{3, 7, 1, Kind::allreduce, "allreduce.x"}},
          {"blocked_report_missing", BlockedReport{3, 7, 1, Kind::allreduce, "allreduce.x", {0, 2}, 1}},
          {"blocked_report_no_more", BlockedReport{3, 8, -1, Kind::barrier, ""}},
          {"deadlock_probe", DeadlockProbe{3, 7, 1, 0, "allreduce.noname.3", false}},
          {"deadlock_probe_confirmed", DeadlockProbe{3, 7, 1, 0, "allreduce.x", true}},
          {"deadlock_reply", DeadlockReply{3, 7, 1, 2, true}},
          {"bucket_ready", BucketReady{3, 1}},
          {"plan_left", PlanLeft{3, 2}},
          {"plan", Plan{3, {{7, 4}, {9}}}},
          {"plan_ended", PlanEnded{3}},
          {"bucket_batch", BucketBatch{3, 1}},
          {"tuned", Tuned{uint64_t(1) << 63 | 5}},
          {"launch_request", LaunchRequest{3, 2, {1, 3}}},
          {"rank_report", RankReport{3, "all is well"}},
          {"launch_turn", LaunchTurn{2, {1, 3}}}};
}

// What comes back of a message.
template <class Message> Message back_up(const Message& message) {
  return std::get<Message>(std::get<UpMessage>(parse_up(encode(UpFrame(message)), 0)));
}
template <class Message> Message back_down(const Message& message) {
  return std::get<Message>(std::get<DownMessage>(parse_down(encode(DownFrame(message)), 0)));
}

TEST(Message, EachSurvivesTheWayThereAndBack) {
  std::vector<bool> seen(kTags);
  for (auto& [name, up, bytes] : samples()) {
    EXPECT_EQ(anew(up, bytes), bytes) << name;
    seen[size_t(bytes[0])] = true;
  }
  EXPECT_EQ(seen, std::vector<bool>(kTags, true)) << "a kind of message has no sample";
}

TEST(Message, OfTheWrongDirectionIsAFaultThatNamesItsSender) {
  for (auto& [name, up, bytes] : samples()) {
    if (bytes[0] == kMemberLeft) continue;
    try {
      anew(!up, bytes);
      ADD_FAILURE() << name << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::internal);
      EXPECT_EQ(error.what(), std::string("rank 7 sent a message that only ") + (up ? "members" : "coordinators") +
                                  " send")
          << name;
    }
  }
}

TEST(Message, SaysWhoItIsFromIfAnAggregatorPassesItOn) {
  EXPECT_EQ(named_sender(Query{"k", 4}), 4);
  EXPECT_EQ(named_sender(Refused{"k", "why", 3}), 3);
  EXPECT_EQ(named_sender(Contended{"k", 4}), 4);
  EXPECT_EQ(named_sender(NameGivenUp{"k", 1}), 1);
  EXPECT_EQ(named_sender(BlockedReport{5, 7, 1, Kind::alltoall, "k"}), 5);
  EXPECT_EQ(named_sender(DeadlockReply{6, 7, 1, 2, true}), 6);
  EXPECT_EQ(named_sender(LaunchRequest{2, 7, {}}), 2);
  EXPECT_EQ(named_sender(RankReport{3, "all is well"}), 3);
  EXPECT_EQ(named_sender(Announce{"k", {}}), std::nullopt);
  EXPECT_EQ(named_sender(CachedRequest{1, 2}), std::nullopt);
  EXPECT_EQ(named_sender(MembersAbsent{"k", "why", {4}}), std::nullopt);
}

TEST(Message, TheFieldsComeBackInTheirPlaces) {
  const auto announce = back_up(Announce{"alltoall.x", announcement()});
  EXPECT_EQ(announce.key, "alltoall.x");
  EXPECT_EQ(announce.what, announcement());
  EXPECT_FALSE(announce.again);
  EXPECT_TRUE(back_up(Announce{"x", {}, true}).again);
  const auto cached = back_up(CachedRequest{7, 3});
  EXPECT_EQ(cached.id, 7u);
  EXPECT_EQ(cached.generation, 3u);
  const Batch sent{{{4, 9, false, "", {}}, {5, 1, true, "allgather.y", {{1, 2, 3}, {0, 0, 9}}}}};
  const auto batch = back_down(sent);
  ASSERT_EQ(batch.responses.size(), 2u);
  EXPECT_FALSE(batch.responses[0].fresh);
  EXPECT_EQ(batch.responses[0].id, 4u);
  EXPECT_EQ(batch.responses[0].generation, 9u);
  EXPECT_TRUE(batch.responses[1].fresh);
  EXPECT_EQ(batch.responses[1].key, "allgather.y");
  EXPECT_EQ(batch.responses[1].rows, (std::vector<std::vector<int64_t>>{{1, 2, 3}, {0, 0, 9}}));
  const auto failure = back_down(Failure{"k", Code::shut_down, "why", {1}, {2, 3}});
  EXPECT_EQ(failure.key, "k");
  EXPECT_EQ(failure.code, Code::shut_down);
  EXPECT_EQ(failure.text, "why");
  EXPECT_EQ(failure.only, std::vector<int32_t>{1});
  EXPECT_EQ(failure.absent, (std::vector<int32_t>{2, 3}));
  const auto absence = back_up(MembersAbsent{"k", "why", {4}});
  EXPECT_EQ(absence.key, "k");
  EXPECT_EQ(absence.text, "why");
  EXPECT_EQ(absence.absent, std::vector<int32_t>{4});
  EXPECT_EQ(back_down(Tuned{uint64_t(1) << 63 | 5}).second, uint64_t(1) << 63 | 5);
  const auto request = back_up(LaunchRequest{3, 2, {1, 3}});
  EXPECT_EQ(request.rank, 3);
  EXPECT_EQ(request.group, 2);
  EXPECT_EQ(request.ranks, (std::vector<int32_t>{1, 3}));
  const auto report = back_up(RankReport{3, "all is well"});
  EXPECT_EQ(report.rank, 3);
  EXPECT_EQ(report.text, "all is well");
  const auto turn = back_down(LaunchTurn{2, {1, 3}});
  EXPECT_EQ(turn.group, 2);
  EXPECT_EQ(turn.ranks, (std::vector<int32_t>{1, 3}));
  const auto missing = back_down(Missing{"k", {4, 1}});
  EXPECT_EQ(missing.members, (std::vector<int32_t>{4, 1}));
  EXPECT_EQ(back_down(Missing{"k", {}, {3}}).joined, std::vector<int32_t>{3});
  const auto without = back_down(Batch{{{5, 2, true, "k", {}, {1, 2}, announcement()}}}).responses[0];
  EXPECT_EQ(without.absent, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(without.what, announcement());
  EXPECT_TRUE(back_up(Query{"k", 4, true}).blocked);
  const auto query = back_up(Query{"k", 4});
  EXPECT_EQ(query.key, "k");
  EXPECT_EQ(query.member, 4);
  EXPECT_EQ(back_down(Missing{"k", {}, {}, 4}).to, 4);
  EXPECT_EQ(back_down(Missing{"k", {}, {}, 4, "why"}).note, "why");
  const auto refused = back_up(Refused{"k", "why", 3});
  EXPECT_EQ(refused.key, "k");
  EXPECT_EQ(refused.why, "why");
  EXPECT_EQ(refused.member, 3);
}

TEST(Message, TheFieldsOfWhatAggregatorsTellComeBackInTheirPlaces) {
  const AggregatedRequests all{{{{0, 3, 5, 5}, Announce{"k", announcement(), true}}, {{4, 4}, CachedRequest{7, 3}}}};
  const auto aggregated = std::get<AggregatedRequests>(parse_up(encode(all), 0));
  ASSERT_EQ(aggregated.requests.size(), 2u);
  EXPECT_EQ(aggregated.requests[0].positions, (std::vector<int32_t>{0, 3, 5, 5}));
  EXPECT_EQ(std::get<Announce>(aggregated.requests[0].request), (Announce{"k", announcement(), true}));
  EXPECT_EQ(aggregated.requests[1].positions, (std::vector<int32_t>{4, 4}));
  EXPECT_EQ(std::get<CachedRequest>(aggregated.requests[1].request), (CachedRequest{7, 3}));
  const auto left = std::get<MemberLeft>(parse_down(encode(DownFrame(MemberLeft{2, "why"})), 0));
  EXPECT_EQ(left.member, 2);
  EXPECT_EQ(left.why, "why");
  const auto report = back_up(BlockedReport{3, 7, 1, Kind::alltoall, "k"});
  EXPECT_EQ(report.rank, 3);
  EXPECT_EQ(report.state, 7u);
  EXPECT_EQ(report.group, 1);
  EXPECT_EQ(report.kind, Kind::alltoall);
  EXPECT_EQ(report.key, "k");
  const auto probe = back_down(DeadlockProbe{3, 7, 1, 2, "k", true});
  EXPECT_EQ(probe.rank, 3);
  EXPECT_EQ(probe.state, 7u);
  EXPECT_EQ(probe.other, 1);
  EXPECT_EQ(probe.group, 2);
  EXPECT_EQ(probe.key, "k");
  EXPECT_TRUE(probe.confirmed);
  const auto reply = back_up(DeadlockReply{3, 7, 1, 2, true});
  EXPECT_EQ(reply.rank, 3);
  EXPECT_EQ(reply.state, 7u);
  EXPECT_EQ(reply.other, 1);
  EXPECT_EQ(reply.group, 2);
  EXPECT_TRUE(reply.deadlocked);
}

TEST(Message, RangesThatAreNoneAreRefused) {
  using Positions = std::vector<int32_t>;
  for (const Positions& positions :
       {Positions{}, Positions{0}, Positions{-1, 3}, Positions{3, 2}, Positions{0, 3, 4, 5}, Positions{0, 3, 2, 5},
        Positions{0, INT32_MAX, 0, 0}, Positions{0, 1, 3}})
    EXPECT_THROW(parse_up(encode(AggregatedRequests{{{positions, CachedRequest{1, 1}}}}), 0), Error)
        << testing::PrintToString(positions);
  for (const Positions& positions : {Positions{0, 0}, Positions{0, 3, 5, 6}, Positions{INT32_MAX, INT32_MAX}})
    EXPECT_NO_THROW(parse_up(encode(AggregatedRequests{{{positions, CachedRequest{1, 1}}}}), 0))
        << testing::PrintToString(positions);
}

TEST(Message, EveryTruncationAndEveryExtensionIsRefused) {
  for (auto& [name, up, bytes] : samples()) {
    for (size_t n = 0; n < bytes.size(); ++n)
      EXPECT_THROW(anew(up, bytes.substr(0, n)), Error) << name << " cut to " << n;
    EXPECT_THROW(anew(up, bytes + '\0'), Error) << name;
  }
}

TEST(Message, ValuesOutOfRangeAreRefused) {
  const auto refused = [](const auto& message) {
    const Sample sample("", message);
    EXPECT_THROW(anew(sample.up, sample.bytes), Error);
  };
  Announcement what = announcement();
  what.kind = Kind(kKinds);
  refused(Announce{"k", what});
  for (const Kind kind : {Kind::send, Kind::receive}) {  // nobody negotiates them
    what.kind = kind;
    refused(Announce{"k", what});
    refused(BlockedReport{0, 0, 0, kind, ""});
  }
  what = announcement(), what.op = ReduceOp(6);
  refused(Announce{"k", what});
  what = announcement(), what.tensors[0].dtype = DType(-1);
  refused(Announce{"k", what});
  what = announcement(), what.tensors[0].shape = {2, -1};
  refused(Announce{"k", what});
  what = announcement(), what.tensors[0].shape = {int64_t(1) << 32, int64_t(1) << 32};
  refused(Announce{"k", what});
  what = announcement(), what.tensors[0].shape = {0, INT64_MAX, INT64_MAX};  // no elements, but products overflow
  refused(Announce{"k", what});
  what = announcement(), what.tensors[0].shape = Shape(65, 1);
  refused(Announce{"k", what});
  what = announcement(), what.kind = Kind(-1);
  refused(Batch{{{5, 2, true, "k", {}, {1}, what}}});
  refused(Failure{"k", Code(8), "", {}, {}});
  refused(BlockedReport{0, 0, 0, Kind(kKinds), ""});
  what = announcement(), what.op = ReduceOp(-1);
  refused(AggregatedRequests{{{{0, 0}, Announce{"k", what}}}});
  for (bool up : {true, false}) EXPECT_THROW(anew(up, std::string(1, char(kTags))), Error);
}

TEST(Message, AFlagThatIsNeitherZeroNorOneIsRefused) {
  std::string bytes = encode(Batch{{{4, 9, false, "", {}}}});
  ASSERT_EQ(bytes.back(), '\0');
  bytes.back() = '\2';
  EXPECT_THROW(parse_down(bytes, 0), Error);
  bytes = encode(Announce{"", {}, true});
  const size_t again = 1 + sizeof(uint32_t);  // behind the alternative and an empty key
  ASSERT_EQ(bytes[again], '\1');
  bytes[again] = '\2';
  EXPECT_THROW(parse_up(bytes, 0), Error);
}

TEST(Message, TheFuzzersCorpusHoldsEverySample) {
  std::map<std::string, std::string> files;
  for (const auto& [name, up, bytes] : samples()) files[name] = bytes;
  lightcc::test::expect_corpus("message_fuzz", files);
}

}  // namespace
}  // namespace lightcc
