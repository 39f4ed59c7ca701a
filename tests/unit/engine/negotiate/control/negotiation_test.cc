// Both halves of the negotiation together, at random: coordinator and response caches must understand each other
// whatever the timing and however small the cache.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>

#include "engine/negotiate/control/coordinator.h"
#include "engine/negotiate/control/response_cache.h"
#include "labels.h"
#include "unit/simulated.h"

LABEL(alone);

namespace lightcc {
namespace {

Announcement allgather(int64_t rows) {
  Announcement what;
  what.kind = Kind::allgather, what.tensors = {{DType::float32, {rows, 2}}};
  return what;
}

// One coordinator and the response caches of all members, joined by queues that deliver in order but whenever they
// like. Members go on to the next round when their own is done. In each round the same requests are made by all, in
// another order by each, with rows that change now and then: what runs must be the same everywhere and never out of
// date. Each member joins after a number of rounds of its own, and when all have joined, they begin anew.
class SimulatedMembers {
 public:
  SimulatedMembers(int size, Coordinator::Limits limits, uint64_t seed)
      : coordinator_(ranks(size), limits), members_(size_t(size)), random_(seed) {}

  void play(int rounds, int keys) {
    const auto goes_on = [](const Member& member) { return member.epoch < kEpochs; };
    for (uint64_t turns = 0; std::any_of(members_.begin(), members_.end(), goes_on); ++turns) {
      ASSERT_LT(turns, 1'000'000u) << "stuck";
      const size_t i = random_() % members_.size();
      Member& member = members_[i];
      switch (random_() % 4) {
        case 0:
          if (!member.pending.empty() || member.epoch == kEpochs) break;
          if (++member.round <= rounds_of(i, member.epoch, rounds)) begin_round(i, keys);
          else join(i);
          break;
        case 1:
          if (!member.to_coordinator.empty()) receive_up(i);
          break;
        case 2:
          for (const DownMessage& message : coordinator_.take_messages())
            for (Member& each : members_) each.from_coordinator.push_back(message);
          break;
        case 3:
          if (!member.from_coordinator.empty()) receive_down(i);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
    for (Member& member : members_) EXPECT_EQ(member.ran, members_[0].ran) << "members ran in different orders";
  }

 private:
  static constexpr int kEpochs = 3;
  static constexpr const char* kJoin = "join.";
  struct Member {
    ResponseCache cache;
    int epoch = 0, round = 0;
    std::set<std::string> pending;
    std::deque<UpMessage> to_coordinator;
    std::deque<DownMessage> from_coordinator;
    std::vector<std::string> ran;
  };
  static std::vector<int> ranks(int size) {
    std::vector<int> all;
    for (int i = 0; i < size; ++i) all.push_back(i);
    return all;
  }
  static int64_t rows(size_t member, const std::string& key, int round) {
    return int64_t(member) + int64_t(key[0]) + round / 3 * (member == 1);  // member 1's change every third round
  }
  static int rounds_of(size_t member, int epoch, int rounds) {
    return 1 + int(member * 7 + size_t(epoch) * 5) % rounds;
  }
  static Announcement joining() {
    Announcement what;
    what.kind = Kind::join;
    return what;
  }
  void join(size_t i) {
    members_[i].pending.insert(kJoin);
    members_[i].to_coordinator.push_back(members_[i].cache.announce(kJoin, joining()));
  }
  Announcement announcement(size_t i, const std::string& key) const {
    return allgather(rows(i, key, members_[i].round));
  }
  void begin_round(size_t i, int keys) {
    std::vector<std::string> names;
    for (int k = 0; k < keys; ++k)
      if ((members_[i].round * 7 + k * 3) % 5 < 3) names.push_back(std::string(1, char('a' + k)));
    std::shuffle(names.begin(), names.end(), random_);
    for (auto& name : names) {
      members_[i].pending.insert(name);
      members_[i].to_coordinator.push_back(members_[i].cache.announce(name, announcement(i, name)));
    }
  }
  void receive_up(size_t i) {
    UpMessage message = std::move(members_[i].to_coordinator.front());
    members_[i].to_coordinator.pop_front();
    if (auto* one = std::get_if<Announce>(&message)) coordinator_.announce(int(i), one->key, one->what, one->again);
    else
      coordinator_.announce_cached(int(i), std::get<CachedRequest>(message));
  }
  void receive_down(size_t i) {
    Member& member = members_[i];
    DownMessage message = std::move(member.from_coordinator.front());
    member.from_coordinator.pop_front();
    ASSERT_TRUE(std::holds_alternative<Batch>(message));
    for (Response& one : std::get<Batch>(message).responses) {
      std::optional<std::string> again;
      const Response response = member.cache.apply(std::move(one), &again);
      const auto absent = [&](size_t j) {
        return std::find(response.absent.begin(), response.absent.end(), int(j)) != response.absent.end();
      };
      member.ran.push_back(response.key);
      ASSERT_EQ(member.pending.erase(response.key), absent(i) ? 0u : 1u) << response.key << " was not asked for";
      if (response.key == kJoin) {
        ++member.epoch, member.round = 0;
      } else {
        ASSERT_EQ(response.rows[0].size(), members_.size());
        for (size_t j = 0; j < members_.size(); ++j) {
          if (absent(i) && !absent(j)) continue;  // it is in no round
          const int64_t expected = absent(j) ? 0 : rows(j, response.key, member.round);
          ASSERT_EQ(response.rows[0][j], expected) << response.key << " is out of date";
        }
        ASSERT_EQ(response.what, response.absent.empty() ? Announcement() : allgather(0));
      }
      if (again && member.pending.count(*again)) {
        UpMessage anew = member.cache.announce(*again, *again == kJoin ? joining() : announcement(i, *again));
        std::get<Announce>(anew).again = true;
        member.to_coordinator.push_back(anew);
      }
    }
  }

  Coordinator coordinator_;
  std::vector<Member> members_;
  std::mt19937_64 random_;
};

TEST(Negotiation, AllRunTheSameWhateverTheTimingAndTheCache) {
  const uint64_t seed = test::run_seed();
  for (int size : {1, 2, 3, 5})
    for (int capacity : {0, 1, 2, 5, 100})
      for (uint64_t run = 0; run < 5; ++run) {
        SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << size << " members, capacity " << capacity);
        SimulatedMembers members(size, {{1 << 20, true}, capacity}, seed + run);
        members.play(30, 8);
        if (HasFailure()) return;
      }
}

}  // namespace
}  // namespace lightcc
