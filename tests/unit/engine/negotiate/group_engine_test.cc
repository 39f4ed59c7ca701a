// One group's engine on each of its members, stepped by hand in one thread. Its effects are not carried out but written
// down.
#include "engine/negotiate/group_engine.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "base/clock.h"
#include "base/overloaded.h"
#include "labels.h"
#include "unit/group_parts.h"
#include "unit/ranks.h"

LABEL(alone);

namespace lightcc {
namespace {

using namespace test;

struct Member : GroupParts {
  Member(std::unique_ptr<Peers> p, Config c) : GroupParts(std::move(p), std::move(c)) {
    std::vector<int> all(size_t(peers->size()));
    std::iota(all.begin(), all.end(), 0);
    auto group = std::make_shared<Group>(0, all, peers->rank(), peers->topology());
    lock.try_lock();
    engine = std::make_unique<GroupEngine>(shared, group, CacheFile::of(config.cache_dir, "threads"));
  }
  void carry_out_effects() {
    while (auto effect = effects.pop())
      std::visit(Overloaded{[&](const effect::Finish& end) {
                              end.request->code = end.code;
                              end.request->text = end.text;
                              end.request->finished = true;
                              finished += (finished.empty() ? "" : " ") + end.request->key;
                            },
                            [&](const effect::EndEpoch& end) { ended = end.cause; },
                            [&](const effect::ChangeGroups& change) { changes.push_back(change.request); },
                            [](const auto&) { ADD_FAILURE() << "nothing else is wanted of the engine"; }},
                 *effect);
  }

  std::unique_ptr<GroupEngine> engine;
  std::string finished;              // keys, in order
  EpochCause ended;
  std::vector<RequestPtr> changes;   // of groups
};

class Members {
 public:
  explicit Members(const std::vector<int>& hosts, const Config& config = {}) {
    for (auto& peers : thread_peers(hosts)) all_.push_back(std::make_unique<Member>(std::move(peers), config));
  }
  Member& operator[](int rank) { return *all_[size_t(rank)]; }
  int size() const { return int(all_.size()); }
  bool until(const std::function<bool()>& done) {
    for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline;) {
      if (done()) return true;
      step();
    }
    return false;
  }
  void step_for_a_while() {
    for (const uint64_t end = now_ns() + 20'000'000; now_ns() < end;) step();
  }

 private:
  void step() {
    for (auto& member : all_) {
      member->peers->step();
      member->engine->step();
      member->carry_out_effects();
      member->peers->flush_and_wake();
    }
  }
  std::vector<std::unique_ptr<Member>> all_;
};

RequestPtr sum_of(const std::string& name, std::vector<float>& data) {
  RequestForm form(Kind::allreduce, name.c_str());
  form.add_tensor({DType::float32, {int64_t(data.size())}}, data.data(), data.data());
  auto request = std::make_shared<Request>(std::move(form));
  request->submitted(now_ns());
  return request;
}

const std::vector<int> kOneHost{3}, kHosts{1, 2};

// One all-reduce of so many bytes, from its begin to its end on all members.
void reduce(Members& members, size_t bytes) {
  std::vector<std::vector<float>> data(size_t(members.size()), std::vector<float>(bytes / sizeof(float), 1));
  std::vector<RequestPtr> requests;
  for (int rank = 0; rank < members.size(); ++rank) {
    requests.push_back(sum_of("x" + std::to_string(bytes), data[size_t(rank)]));
    members[rank].engine->submit(requests.back());
  }
  EXPECT_TRUE(members.until([&] {
    return std::all_of(requests.begin(), requests.end(), [](auto& one) { return one->finished.load(); });
  }));
  for (const auto& each : data) EXPECT_EQ(each, std::vector<float>(bytes / sizeof(float), float(members.size())));
}
// The choices that all members have.
AutotuneChoices choices(Members& members) {
  const AutotuneChoices all = members[0].engine->negotiator().autotune_choices();
  for (int rank = 0; rank < members.size(); ++rank)
    EXPECT_EQ(members[rank].engine->negotiator().autotune_choices(), all);
  return all;
}

Config tuned() {
  Config config;
  config.autotune = true;
  config.autotune_warmup_samples = 0;
  config.autotune_steps_per_sample = 1;
  config.autotune_most_samples = 6;
  return config;
}

TEST(GroupEngine, ARequestRunsOnceAllMembersHaveAnnouncedIt) {
  for (const auto& hosts : {kOneHost, kHosts}) {
    Members members(hosts);
    std::vector<std::vector<float>> data(3, std::vector<float>(100, 1));
    std::vector<RequestPtr> requests;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(members[rank].engine->idle());
      requests.push_back(sum_of("x", data[size_t(rank)]));
      members[rank].engine->submit(requests.back());
      EXPECT_TRUE(members[rank].engine->announced(Kind::allreduce, false, "allreduce.x"));
      members.step_for_a_while();
      EXPECT_EQ(requests[0]->finished, rank == 2) << "after rank " << rank;
    }
    EXPECT_TRUE(members.until([&] { return requests[1]->finished && requests[2]->finished; }));
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(requests[size_t(rank)]->code, Code::ok);
      EXPECT_EQ(data[size_t(rank)], std::vector<float>(100, 3));
      EXPECT_TRUE(members[rank].engine->idle());
    }
  }
}

// The exchange of one leaves time for the other.
TEST(GroupEngine, TwoBatchesRunAtATimeBetweenHostsAndOneOnAHost) {
  for (const bool between_hosts : {true, false}) {
    Members members(between_hosts ? std::vector<int>{1, 1} : std::vector<int>{2});
    constexpr size_t kCount = 1'500'000;
    std::vector<std::vector<float>> data(8, std::vector<float>(kCount, 1));
    std::vector<RequestPtr> requests;
    for (int rank = 0; rank < 2; ++rank)
      for (const char* name : {"a", "b", "c", "d"}) {
        requests.push_back(sum_of(name, data[requests.size()]));
        members[rank].engine->submit(requests.back());
      }
    uint64_t most = 0;
    EXPECT_TRUE(members.until([&] {
      uint64_t ended = 0;
      for (size_t i = 0; i < 4; ++i) ended += requests[i]->finished;
      most = std::max(most, members[0].counters.values[Counters::collectives] - ended);
      return std::all_of(requests.begin(), requests.end(), [](auto& one) { return one->finished.load(); });
    }));
    EXPECT_EQ(most, between_hosts ? 2u : 1u);
    EXPECT_EQ(members[0].finished, "allreduce.a allreduce.b allreduce.c allreduce.d");
    for (const auto& each : data) EXPECT_EQ(each, std::vector<float>(kCount, 2));
  }
}

TEST(GroupEngine, AllMembersFinishInOneOrderWhateverTheirOwn) {
  Config config;
  config.fusion = false;
  Members members(kHosts, config);
  const std::vector<std::vector<std::string>> orders{{"a", "b", "c"}, {"c", "a", "b"}, {"b", "c", "a"}};
  std::vector<std::vector<float>> data(9, std::vector<float>(10, 1));
  std::vector<RequestPtr> requests;
  for (int rank = 0; rank < 3; ++rank)
    for (const std::string& name : orders[size_t(rank)]) {
      requests.push_back(sum_of(name, data[requests.size()]));
      members[rank].engine->submit(requests.back());
    }
  EXPECT_TRUE(members.until([&] {
    return std::all_of(requests.begin(), requests.end(), [](auto& one) { return one->finished.load(); });
  }));
  EXPECT_EQ(members[1].finished, members[0].finished);
  EXPECT_EQ(members[2].finished, members[0].finished);
}

TEST(GroupEngine, MembersThatDisagreeAllHearWhoAndAboutWhat) {
  Members members(kOneHost);
  std::vector<float> ten(10), eleven(11);
  std::vector<RequestPtr> requests{sum_of("x", ten), sum_of("x", ten), sum_of("x", eleven)};
  for (int rank = 0; rank < 3; ++rank) members[rank].engine->submit(requests[size_t(rank)]);
  for (const RequestPtr& one : requests) {
    EXPECT_TRUE(members.until([&] { return one->finished.load(); }));
    EXPECT_EQ(one->code, Code::mismatch);
    EXPECT_NE(one->text.find("'x'"), std::string::npos) << one->text;
    EXPECT_NE(one->text.find("rank 2 has [11]"), std::string::npos) << one->text;
  }
  EXPECT_EQ(members[0].ended.code, Code::ok) << "the epoch goes on";
}

TEST(GroupEngine, ABatchThatChangesGroupsWaitsUntilThatIsCarriedOut) {
  Members members(kOneHost);
  std::vector<RequestPtr> requests;
  for (int rank = 0; rank < 3; ++rank) {
    auto request = std::make_shared<Request>();
    request->what.kind = Kind::add_group;
    request->what.tensors = {{DType::int32, {0, 1}}};
    request->key = key_of(Kind::add_group, "x");
    request->submitted_ns = request->warned_ns = now_ns();
    requests.push_back(request);
    members[rank].engine->submit(request);
  }
  const auto all = [&](const auto& what) {
    return members.until([&] { return what(0) && what(1) && what(2); });
  };
  EXPECT_TRUE(all([&](int rank) { return !members[rank].changes.empty(); }));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(members[rank].changes[0], requests[size_t(rank)]);
    EXPECT_FALSE(requests[size_t(rank)]->finished);
    requests[size_t(rank)]->changed_group = 1;
  }
  EXPECT_TRUE(all([&](int rank) { return requests[size_t(rank)]->finished.load(); }));
  for (const RequestPtr& request : requests) EXPECT_EQ(request->code, Code::ok) << request->text;
}

// Turns of other groups and the world's own batches come in one order on all ranks.
TEST(GroupEngine, ALaunchHasItsTurnWhereItsMessageComes) {
  Members members(kOneHost);
  Member& coordinator = members[0];
  const std::vector<int> ranks{0, 1, 2};
  for (int group = 0; group < 3; ++group)
    coordinator.surroundings.groups.add(group < 2 ? ranks : std::vector<int>{1, 2}, 0, coordinator.peers->topology());
  coordinator.engine->negotiator().send_down(LaunchTurn{1, {0, 1, 2}});
  EXPECT_TRUE(coordinator.launches.is_next(1)) << "before anything else is done";
  coordinator.launches.end_turn(1);
  coordinator.engine->negotiator().send_down(LaunchTurn{1, {0, 2}});
  EXPECT_FALSE(coordinator.launches.has_turn(1)) << "it is for a group that had this id before";
  coordinator.engine->negotiator().send_down(LaunchTurn{2, {1, 2}});
  EXPECT_FALSE(coordinator.launches.has_turn(2)) << "this rank only passes it on";
}

TEST(GroupEngine, WhatARankThatLeftWillNotSendFailsWithItsReason) {
  Members members(kOneHost);
  std::vector<float> data(10);
  const RequestPtr before = sum_of("before", data), after = sum_of("after", data);
  members[1].engine->submit(before);
  members.step_for_a_while();
  for (int rank : {0, 1}) members[rank].engine->rank_left(2, "rank 2 has left (its work is done)");
  EXPECT_TRUE(members.until([&] { return before->finished.load(); }));
  members[1].engine->submit(after);
  members[1].carry_out_effects();
  for (const RequestPtr& one : {before, after}) {
    EXPECT_EQ(one->code, Code::shut_down);
    EXPECT_NE(one->text.find("rank 2 has left (its work is done)"), std::string::npos) << one->text;
  }
}

TEST(GroupEngine, AtTheEndOfTheEpochEverythingInFlightFails) {
  Members members(kOneHost);
  std::vector<float> data(10);
  const RequestPtr one = sum_of("x", data), two = sum_of("y", data);
  for (const RequestPtr& request : {one, two}) members[0].engine->submit(request);
  members[0].engine->fail_all(Code::peer_lost, "rank 1 died");
  members[0].carry_out_effects();
  for (const RequestPtr& request : {one, two}) {
    EXPECT_EQ(request->code, Code::peer_lost);
    EXPECT_EQ(request->text, request->title() + ": rank 1 died");
  }
  EXPECT_TRUE(members[0].engine->idle());
}

TEST(GroupEngine, BothBatchesThatRunFailOnce) {
  Members members({1, 1});
  std::vector<std::vector<float>> data(8, std::vector<float>(1'500'000, 1));
  std::vector<RequestPtr> requests;
  for (int rank = 0; rank < 2; ++rank)
    for (const char* name : {"a", "b", "c", "d"}) {
      requests.push_back(sum_of(name, data[requests.size()]));
      members[rank].engine->submit(requests.back());
    }
  const auto run_two = [&](int rank) { return members[rank].counters.values[Counters::collectives] == 2; };
  EXPECT_TRUE(members.until([&] { return run_two(0) && run_two(1); }));
  for (int rank = 0; rank < 2; ++rank) {
    members[rank].engine->fail_all(Code::peer_lost, "rank 7 died");
    members[rank].carry_out_effects();
    EXPECT_EQ(members[rank].finished, "allreduce.a allreduce.b allreduce.c allreduce.d");
    EXPECT_TRUE(members[rank].engine->idle());
  }
  for (const RequestPtr& request : requests) EXPECT_EQ(request->code, Code::peer_lost);
}

// The coordinator knows who is missing; another member asks it.
TEST(GroupEngine, AStallNamesTheMissingMembersAndCanEndTheEpoch) {
  Config config;
  config.stall_warn_s = 10;
  config.stall_end_s = 60;
  for (int rank : {0, 1})
    for (uint64_t seconds : {9, 11, 61}) {
      Members members(kOneHost, config);
      Member& member = members[rank];
      std::vector<float> data(10);
      const RequestPtr one = sum_of("x", data);
      one->submitted_ns = one->warned_ns = now_ns() - seconds * kSecondNs;
      member.engine->submit(one);
      members.step_for_a_while();
      member.engine->inspect(now_ns());
      members.step_for_a_while();
      EXPECT_EQ(member.counters.values[Counters::stall_warnings], seconds == 11) << seconds;
      EXPECT_EQ(member.ended.code, seconds == 61 ? Code::timeout : Code::ok) << seconds;
      if (seconds < 61) continue;
      const std::string expected = "stalled: allreduce of tensor 'x' has waited 61 s for " +
                                   std::string(rank == 0 ? "rank 1" : "rank 0") + " (a thread), rank 2 (a thread);";
      EXPECT_TRUE(member.ended.text.starts_with(expected)) << member.ended.text;
    }
}

// ---- the tuner

constexpr int k64KiB = 16;

TEST(GroupEngine, TheTunersChoicesAreThoseOfAllMembers) {
  Members members(kHosts, tuned());
  std::vector<AutotuneChoices> seen;
  for (int i = 0; i < 7; ++i) {
    reduce(members, size_t(1) << k64KiB);
    seen.push_back(choices(members));
  }
  for (int i = 0; i < 6; ++i) EXPECT_EQ(seen[size_t(i)], AutotuneChoices(i % 2) << k64KiB) << i;
  for (int i = 0; i < 5; ++i) {
    reduce(members, size_t(1) << k64KiB);
    EXPECT_EQ(choices(members), seen[6]) << "it has settled";
  }
}

TEST(GroupEngine, WhatAnEarlierRunHasFoundHoldsFromTheFirstBatchOn) {
  Config config = tuned();
  config.cache_dir = testing::TempDir() + "group_engine_tuned_" + std::to_string(getpid());
  const CacheFile file = CacheFile::of(config.cache_dir, "threads");
  file.put("tuned", "14:2d 16:links/halving_doubling 17:links/star 19:links/ring 2:links/ring 99:2d x 18:");
  for (int round = 0; round < 2; ++round) {
    Members members(kHosts, config);
    for (int i = 0; i < 8; ++i) {
      reduce(members, size_t(1) << k64KiB);
      EXPECT_EQ(choices(members), AutotuneChoices(1) << 16 | AutotuneChoices(1) << 19);
    }
  }
  Members members(kHosts, config);
  for (int i = 0; i < 6; ++i) reduce(members, size_t(1) << 17);
  const std::string kept = *file.get("tuned");
  EXPECT_TRUE(kept.starts_with("14:2d 16:links/halving_doubling 17:")) << kept;
  EXPECT_EQ(kept.find("star"), std::string::npos) << "found out anew: " << kept;
  EXPECT_TRUE(kept.ends_with(" 19:links/ring")) << kept;
  std::filesystem::remove_all(config.cache_dir);
}

// As calibration does, once the engine has said what is in the file.
TEST(GroupEngine, WhatIsKnownOfOtherRulesIsForgottenWithThem) {
  Config config = tuned();
  config.cache_dir = testing::TempDir() + "group_engine_rules_" + std::to_string(getpid());
  CacheFile::of(config.cache_dir, "threads").put("tuned", "16:links/halving_doubling 17:links/ring");
  Members members(kHosts, config);
  reduce(members, 64);
  EXPECT_EQ(choices(members), AutotuneChoices(1) << 16);
  const Rule rules[] = {{Kind::allreduce, 0, 0, 0, "2d", nullptr}, {Kind::allreduce, 0, 0, 0, "links", "ring"}};
  for (int rank = 0; rank < members.size(); ++rank) members[rank].engine->use_rules(rules, {});
  reduce(members, 64);
  EXPECT_EQ(choices(members), AutotuneChoices(1) << 17);
  std::filesystem::remove_all(config.cache_dir);
}

TEST(GroupEngine, NothingIsTunedUnlessAskedForAndBetweenHosts) {
  Config forced = tuned();
  forced.select = "allreduce=ring";
  const std::pair<std::vector<int>, Config> cases[] = {{kHosts, Config{}}, {kOneHost, tuned()}, {kHosts, forced}};
  for (const auto& [hosts, config] : cases) {
    Members members(hosts, config);
    for (int i = 0; i < 10; ++i) {
      reduce(members, size_t(1) << k64KiB);
      EXPECT_EQ(choices(members), 0u);
    }
  }
}

// Whoever has left in peace has nothing in flight, so nothing that is submitted now can belong to what it has sent.
TEST(GroupEngine, AMessageToWhoHasLeftFailsAtOnce) {
  Members members(kOneHost);
  members[0].engine->rank_left(1, "rank 1 has left (its data have ended)");
  for (const Kind kind : {Kind::send, Kind::receive}) {
    std::vector<float> data(1);
    RequestForm form(kind, "x");
    form.add_tensor({DType::float32, {1}}, data.data(), data.data());
    form.what.root = 1;
    auto request = std::make_shared<Request>(std::move(form));
    members[0].engine->submit(request);
    members[0].carry_out_effects();
    EXPECT_TRUE(request->finished);
    EXPECT_EQ(request->code, Code::shut_down);
    EXPECT_EQ(request->text, request->title() + ": rank 1 has left (its data have ended)");
  }
  EXPECT_EQ(members[0].finished, "send.x recv.x");
}

}  // namespace
}  // namespace lightcc
