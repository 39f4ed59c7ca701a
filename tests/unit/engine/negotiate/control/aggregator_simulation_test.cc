// The negotiation of a group on several hosts, at random: coordinator, aggregators, response caches and fusion plans on
// the group's tree, joined by queues that deliver in order but whenever they like. With aggregators between them, and
// whoever leaves a plan when, all members must see what they would see without: the same batches in the same order, and
// an end of every request.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "base/overloaded.h"
#include "engine/negotiate/control/aggregator.h"
#include "engine/negotiate/control/coordinator.h"
#include "engine/negotiate/control/hold.h"
#include "engine/negotiate/control/member_plans.h"
#include "engine/negotiate/control/response_cache.h"
#include "labels.h"
#include "unit/announcements.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

constexpr const char *kJoin = "join.", *kWithAbsence = "x";
constexpr int kSetKeys = 6;  // "g0", "g1" ..., of the set 1
bool is_of_set(const std::string& key) { return key[0] == 'g'; }

using test::joining;

struct Scenario {  // what happens in a run
  int rounds = 10, keys = 6, epochs = 2;
  int capacity = 5;
  bool mismatches = false;  // now and then a member has another dtype
  bool absences = false;    // in each round one stays away from a request, and another says so
  bool set = false;         // there is a set, of which all come in most rounds
  int leaves_after = -1;    // rounds after which a member leaves; -1: none does
};

class SimulatedGroup {
 public:
  SimulatedGroup(std::vector<int> host_of, Scenario scenario, uint64_t seed)
      : scenario_(scenario),
        random_(seed),
        host_of_(std::move(host_of)),
        coordinator_(ranks(), {{1 << 20, true}, scenario.capacity}) {
    std::vector<int> leader;
    for (size_t i = 0; i < host_of_.size(); ++i)
      leader.push_back(int(std::find(host_of_.begin(), host_of_.end(), host_of_[i]) - host_of_.begin()));
    topology_ = Topology::by_leader(leader);
    for (int i = 0; i < size(); ++i) {
      auto& member = *members_.emplace_back(std::make_unique<Member>(i));
      member.tree = Tree(Group(0, ranks(), i, topology_));
      member.from_child.resize(member.tree.children.size());
      if (i > 0 && !member.tree.children.empty()) member.aggregator = std::make_unique<Aggregator>(member.tree);
    }
    leaver_ = scenario.leaves_after < 0 ? -1 : int(random_() % host_of_.size());
  }

  void run() {
    for (uint64_t turns = 0; !over(); ++turns) {
      ASSERT_LT(turns, 10'000'000u) << "stuck";
      turn(int(random_() % members_.size()));
      if (testing::Test::HasFailure()) return;
    }
    for (auto& member : members_) EXPECT_EQ(member->ran, members_[0]->ran) << "members ran in different orders";
  }
  uint64_t batches() const { return members_[0]->ran.size(); }
  uint64_t planned() const { return planned_; }
  uint64_t failures() const { return failures_; }
  uint64_t answers() const { return answers_; }

 private:
  struct Member {
    explicit Member(int index) : plans(index, cache) {}
    Tree tree;
    std::unique_ptr<Aggregator> aggregator;
    ResponseCache cache;
    MemberPlans plans;
    std::map<std::string, MemberPlans::Slot> slots;
    int epoch = 0, round = 0, reported = 0;
    bool left = false, asks = false;
    int stays = 0, noticed = 0;  // how often it stayed away from a request, and how often it was told so
    std::set<int> known_left;    // of whose leaving it knows
    std::set<std::string> pending;
    std::vector<std::deque<std::string>> from_child;
    std::deque<std::string> from_parent;
    std::vector<std::string> ran;
    bool cut_off() const {
      return std::any_of(tree.ancestors.begin(), tree.ancestors.end(),
                         [&](int one) { return known_left.count(one) > 0; });
    }
  };
  int size() const { return int(host_of_.size()); }
  std::vector<int> ranks() const {
    std::vector<int> all;
    for (int i = 0; i < size(); ++i) all.push_back(i);
    return all;
  }
  Member& at(int i) { return *members_[size_t(i)]; }
  bool goes_on(const Member& member) const {
    return !member.left && member.known_left.empty() && member.epoch < scenario_.epochs;
  }
  bool over() const {
    return std::none_of(members_.begin(), members_.end(), [&](auto& member) {
      if (member->left) return false;
      return goes_on(*member) || !member->pending.empty() || !member->from_parent.empty();
    });
  }

  void turn(int i) {
    Member& member = at(i);
    now_ += random_() % 50 == 0 ? hold::kAggregatorNs : random_() % 1000;
    if (member.left) return;
    switch (random_() % 8) {
      case 0:
      case 1:
        return submit(i);
      case 2:
      case 3:
        return take_in(i);
      case 4:
      case 5:
        return take_out(i);
      case 6:
        if (member.aggregator) member.aggregator->pass_expired(now_), forward_up(i);
        if (i == 0) decide();
        return;
      default:
        // As whoever waits for a request: nothing more comes that it is held for. Or as who has waited for too long.
        if (member.plans.holds() || (scenario_.set && random_() % 2048 == 0)) return leave_plans(i);
        if (scenario_.absences) report_absence(i);
        if (!member.pending.empty() && !std::exchange(member.asks, true)) send_up(i, Query{*member.pending.begin(), i});
    }
  }

  // ---- what a member does by itself

  int rounds_of(int i, int epoch) const {
    return 1 + 14 * scenario_.set + (scenario_.absences ? 5 : i * 7 + epoch * 5) % scenario_.rounds;
  }
  int stays_away(int round) const { return round % size(); }
  int64_t rows(int i, const std::string& key, int round) const { return i + key[0] + round / 3 * (i == 1); }
  Announcement announcement(int i, const std::string& key) {
    if (key == kJoin) return joining();
    const int round = at(i).round;
    Announcement what;
    what.kind = key[0] % 2 && !is_of_set(key) ? Kind::allgather : Kind::allreduce;
    const bool odd = scenario_.mismatches && (round * 3 + key[0]) % 7 == 0 && (round + key[0]) % size() == i;
    what.tensors = {{odd ? DType::int32 : DType::float32, {what.kind == Kind::allgather ? rows(i, key, round) : 3, 2}}};
    return what;
  }
  void submit(int i) {
    Member& member = at(i);
    if (!member.pending.empty() || member.stays > member.noticed || !goes_on(member)) return;
    if (i == leaver_ && ++member.round > scenario_.leaves_after) return leave(i);
    if (i != leaver_) ++member.round;
    if (i != leaver_ && leaver_ < 0 && member.round > rounds_of(i, member.epoch)) return announce(i, kJoin);
    std::vector<std::string> names;
    for (int k = 0; k < scenario_.keys; ++k)
      if ((member.round * 7 + k * 3) % 5 < 3) names.push_back(std::string(1, char('a' + k)));
    if (scenario_.absences && size() > 1 && member.round % 2 == 0) {
      if (stays_away(member.round) == i)
        ++member.stays;
      else
        names.push_back(kWithAbsence);
    }
    std::shuffle(names.begin(), names.end(), random_);
    if (scenario_.set) {
      std::vector<std::string> set;
      for (int k = 0; k < kSetKeys; ++k)
        if (member.round % 9 != 8 || member.round / 9 % kSetKeys != k) set.push_back("g" + std::to_string(k));
      if (random_() % 8 == 0) std::shuffle(set.begin(), set.end(), random_);
      names.insert(names.begin(), set.begin(), set.end());
    }
    for (auto& name : names) announce(i, name);
  }
  void announce(int i, const std::string& key) {
    Member& member = at(i);
    member.pending.insert(key);
    if (key == kJoin) leave_plans(i);
    if (i == 0) coordinator_.set_own(key, 0, is_of_set(key) ? 1 : 0);
    MemberPlans::Slot& slot = member.slots[key];  // kept, or looked for each time
    if (random_() % 4 == 0) slot = {};
    for (UpMessage& message : member.plans.submit(key, announcement(i, key), is_of_set(key) ? 1 : 0, now_, &slot))
      send_up(i, std::move(message));
  }
  void leave_plans(int i) {
    for (UpMessage& message : at(i).plans.leave_all()) send_up(i, std::move(message));
  }
  void report_absence(int i) {
    Member& member = at(i);
    if (!member.pending.count(kWithAbsence) || stays_away(member.round + 1) != i) return;
    if (std::exchange(member.reported, member.round) != member.round)
      send_up(i, MembersAbsent{kWithAbsence, "why", {stays_away(member.round)}});
  }

  // ---- up

  void send_up(int i, UpMessage message) {
    if (i == 0) return coordinate(0, std::move(message));
    if (!at(i).aggregator) return push_up(i, message);
    at(i).aggregator->receive_up(Aggregator::kSelf, std::move(message), now_);
    forward_up(i);
  }
  void push_up(int i, const UpFrame& frame) {
    Member& parent = at(at(i).tree.parent());
    parent.from_child[size_t(parent.tree.toward(i))].push_back(encode(frame));
  }
  void forward_up(int i) {
    for (const UpFrame& frame : at(i).aggregator->take_frames()) push_up(i, frame);
  }
  void take_in(int i) {
    std::vector<size_t> waiting;
    for (size_t c = 0; c < at(i).from_child.size(); ++c)
      if (!at(i).from_child[c].empty()) waiting.push_back(c);
    if (!waiting.empty()) take_in(i, waiting[random_() % waiting.size()]);
  }
  void take_in(int i, size_t child) {
    Member& member = at(i);
    const int sender = member.tree.children[child];
    UpFrame frame = parse_up(member.from_child[child].front(), sender);
    member.from_child[child].pop_front();
    std::visit(Overloaded{[&](UpMessage& message) { receive_up(i, child, std::move(message)); },
                          [&](AggregatedRequests& requests) { receive_up(i, child, std::move(requests)); },
                          [&](MemberLeft& left) { member_left(i, left.member, sender); }},
               frame);
  }
  void receive_up(int i, size_t child, UpMessage message) {
    if (!at(i).aggregator) return coordinate(named_sender(message).value_or(at(i).tree.children[child]), message);
    at(i).aggregator->receive_up(int(child), std::move(message), now_);
    forward_up(i);
  }
  void receive_up(int i, size_t child, AggregatedRequests requests) {
    if (at(i).aggregator) {
      at(i).aggregator->receive_up(int(child), std::move(requests), now_);
      return forward_up(i);
    }
    for_each_request(requests, at(i).tree.below[child],
                     [&](int from, const Readiness& one) {
                       std::visit([&](auto& each) { coordinate(from, each); }, one);
                     });
  }
  void coordinate(int from, const UpMessage& message) {
    if (auto* announce = std::get_if<Announce>(&message)) {
      coordinator_.announce(from, announce->key, announce->what, announce->again, now_);
    } else if (auto* cached = std::get_if<CachedRequest>(&message)) {
      coordinator_.announce_cached(from, *cached, now_);
    } else if (auto* bucket = std::get_if<BucketReady>(&message)) {
      coordinator_.announce_bucket(from, *bucket, now_);
    } else if (auto* left = std::get_if<PlanLeft>(&message)) {
      coordinator_.plan_left(from, left->plan);
    } else if (auto* absence = std::get_if<MembersAbsent>(&message)) {
      coordinator_.members_absent(*absence);
    } else {
      const Query& query = std::get<Query>(message);
      Missing missing{query.key, {}, {}, query.member};
      for (int one : coordinator_.missing(query.key)) missing.members.push_back(one);
      send_down(0, missing);
    }
  }
  void decide() {
    for (const DownMessage& message : coordinator_.take_messages()) send_down(0, message);
  }

  // ---- down

  void send_down(int i, const DownMessage& message) {
    Member& member = at(i);
    if (member.aggregator) member.aggregator->receive_down(message), forward_up(i);
    if (auto* missing = std::get_if<Missing>(&message)) {
      const int child = member.tree.toward(missing->to);
      if (child >= 0) return at(member.tree.children[size_t(child)]).from_parent.push_back(encode(message));
      ASSERT_EQ(missing->to, i) << "an answer that nobody here asked for";
      ++answers_, member.asks = false;
      return;
    }
    for (int child : member.tree.children) at(child).from_parent.push_back(encode(message));
    receive_down(i, message);
  }
  void take_out(int i) {
    Member& member = at(i);
    if (member.from_parent.empty()) {
      if (member.cut_off()) fail_all(i);
      return;
    }
    const int sender = member.tree.parent();
    const DownFrame frame = parse_down(member.from_parent.front(), sender);
    member.from_parent.pop_front();
    std::visit(Overloaded{[&](const DownMessage& message) { send_down(i, message); },
                          [&](const MemberLeft& left) { member_left(i, left.member, sender); }},
               frame);
  }
  void receive_down(int i, const DownMessage& message) {
    Member& member = at(i);
    if (auto* failure = std::get_if<Failure>(&message)) {
      const auto& only = failure->only;
      if (!only.empty() && std::find(only.begin(), only.end(), i) == only.end()) return;
      member.cache.forget(failure->key);
      if (std::find(failure->absent.begin(), failure->absent.end(), i) != failure->absent.end()) {
        ++member.noticed;
        return;
      }
      failures_ += member.pending.erase(failure->key);
      return;
    }
    std::string line;
    if (auto* plan = std::get_if<Plan>(&message)) return member.plans.begin(*plan);
    if (auto* ended = std::get_if<PlanEnded>(&message)) {
      for (UpMessage& one : member.plans.end(*ended)) send_up(i, std::move(one));
      return;
    }
    if (auto* bucket = std::get_if<BucketBatch>(&message)) {
      for (const std::string& key : member.plans.run(*bucket)) {
        line += key + " ";
        ASSERT_EQ(member.pending.erase(key), 1u) << key << " was not asked for";
      }
      member.ran.push_back(line);
      planned_ += i == 0;
      return;
    }
    for (const Response& one : std::get<Batch>(message).responses) {
      std::optional<std::string> again;
      const Response response = member.cache.apply(one, &again);
      const auto absent = [&](int j) {
        return std::find(response.absent.begin(), response.absent.end(), j) != response.absent.end();
      };
      line += response.key + " ";
      ASSERT_EQ(member.pending.erase(response.key), absent(i) ? 0u : 1u) << response.key << " was not asked for";
      if (response.key == kJoin) {
        ++member.epoch, member.round = member.reported = 0;
      } else if (!response.rows.empty()) {
        for (int j = 0; j < size(); ++j) {
          if (absent(i) && !absent(j)) continue;  // it is in no round
          ASSERT_EQ(response.rows[0][size_t(j)], absent(j) ? 0 : rows(j, response.key, member.round)) << "out of date";
        }
      }
      if (again && member.pending.count(*again)) {
        UpMessage anew = member.cache.announce(*again, announcement(i, *again));
        std::get<Announce>(anew).again = true;
        send_up(i, std::move(anew));
      }
    }
    member.ran.push_back(line);
  }
  void fail_all(int i) {
    failures_ += at(i).pending.size();
    at(i).pending.clear();
  }

  // ---- members that leave

  // After everything that it had to send. Who shares its host sees it, whenever that may be.
  void leave(int i) {
    Member& member = at(i);
    while (!member.from_parent.empty()) take_out(i);
    if (!member.pending.empty() || member.left) return;
    if (i == 0) decide();
    if (member.aggregator) member.aggregator->member_left(), forward_up(i);
    member.left = true;
    pass_on(i, i, -1);
    for (int other = 0; other < size(); ++other)
      if (other != i && topology_.share_host(i, other)) member_left(other, i, -1);
  }
  void pass_on(int i, int leaver, int from) {
    const MemberLeft left{leaver, "it shut down"};
    const std::string bytes = encode(DownFrame(left));
    for (int child : at(i).tree.children)
      if (child != from && !topology_.share_host(child, leaver)) at(child).from_parent.push_back(bytes);
    const int parent = at(i).tree.parent();
    if (parent >= 0 && parent != from && !topology_.share_host(parent, leaver)) push_up(i, left);
  }
  void member_left(int i, int leaver, int from) {
    Member& member = at(i);
    if (member.left || !member.known_left.insert(leaver).second) return;
    for (size_t child = 0; child < member.from_child.size(); ++child)  // what it announced before it left
      while (!member.from_child[child].empty()) take_in(i, child);
    if (member.aggregator) member.aggregator->member_left(), forward_up(i);
    if (i == 0) decide(), coordinator_.member_left(leaver, "has left"), decide();
    pass_on(i, leaver, from);
  }

  const Scenario scenario_;
  std::mt19937_64 random_;
  const std::vector<int> host_of_;
  Topology topology_;
  Coordinator coordinator_;
  std::vector<std::unique_ptr<Member>> members_;
  uint64_t now_ = 0, failures_ = 0, answers_ = 0, planned_ = 0;
  int leaver_;
};

struct Sums {
  uint64_t batches = 0, failures = 0, answers = 0, planned = 0;
};

// Runs of groups of every kind. LIGHTCC_TEST_SEED replays them.
Sums run_groups(const std::function<Scenario(std::mt19937_64&)>& make, int runs) {
  Sums sums;
  const uint64_t seed = test::run_seed();
  for (int run = 0; run < runs && !testing::Test::HasFailure(); ++run) {
    std::mt19937_64 random(seed + uint64_t(run));
    Scenario scenario = make(random);
    const int size = 1 + int(random() % (scenario.set ? 10 : 24)), hosts = 1 + int(random() % 12);
    std::vector<int> host_of;
    for (int i = 0; i < size; ++i) host_of.push_back(random() % 2 ? i * hosts / size : int(random() % uint64_t(hosts)));
    scenario.capacity = std::vector<int>{0, 1, 2, 5, 100}[random() % 5];
    if (scenario.set) scenario.capacity = random() % 4 == 0 ? 9 : 100;
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", run " << run << ", " << size << " members on " << hosts
                                    << " hosts, capacity " << scenario.capacity);
    SimulatedGroup group(host_of, scenario, seed * 31 + uint64_t(run));
    group.run();
    sums.batches += group.batches(), sums.failures += group.failures(), sums.answers += group.answers();
    sums.planned += group.planned();
  }
  return sums;
}

TEST(Aggregators, AllRunTheSameWhateverTheTreeTheTimingAndTheCache) {
  const Sums sums = run_groups([](auto&) { return Scenario{}; }, 60);
  EXPECT_GT(sums.batches, 1000u);
  EXPECT_GT(sums.answers, 100u);
  EXPECT_EQ(sums.failures, 0u);
}

TEST(Aggregators, PlansRunTheSameWhoeverLeavesThemWhen) {
  const Sums sums = run_groups([](auto&) { return Scenario{.set = true}; }, 60);
  EXPECT_GT(sums.planned, 200u);
  EXPECT_EQ(sums.failures, 0u);
}

TEST(Aggregators, PlansOfMembersThatDisagreeStayAwayOrLeaveEnd) {
  const Sums sums = run_groups(
      [](auto& random) {
        const int leaves_after = random() % 3 == 0 ? 15 + int(random() % 20) : -1;
        const bool absences = leaves_after < 0 && random() % 2 == 0;
        return Scenario{.mismatches = random() % 2 == 0, .absences = absences, .set = true,
                        .leaves_after = leaves_after};
      },
      150);
  EXPECT_GT(sums.planned, 200u);
  EXPECT_GT(sums.failures, 100u);
}

TEST(Aggregators, DisagreementsEndOnAll) {
  const Sums sums = run_groups([](auto&) { return Scenario{.mismatches = true}; }, 60);
  EXPECT_GT(sums.batches, 1000u);
  EXPECT_GT(sums.failures, 100u);
}

TEST(Aggregators, AbsencesReachWhoeverComesToIt) {
  const Sums sums = run_groups([](auto&) { return Scenario{.absences = true}; }, 60);
  EXPECT_GT(sums.batches, 1000u);
  EXPECT_GT(sums.failures, 100u);
}

TEST(Aggregators, WhatIsPendingWhenAMemberLeavesEndsOnAll) {
  const Sums sums = run_groups(
      [](auto& random) { return Scenario{.mismatches = random() % 2 == 0, .leaves_after = 1 + int(random() % 8)}; },
      150);
  EXPECT_GT(sums.batches, 1000u);
  EXPECT_GT(sums.failures, 100u);
}

}  // namespace
}  // namespace lightcc
