// Heartbeats over real sockets, at times that the test makes up.
#include "net/heart.h"

#include <gtest/gtest.h>

#include <memory>

#include "base/clock.h"
#include "net/peers.h"

namespace lightcc {
namespace {

struct Hearts {
  explicit Hearts(const std::vector<int>& ranks_of_hosts) {
    std::vector<int> leader;
    for (int ranks : ranks_of_hosts) {
      leader.insert(leader.end(), size_t(ranks), int(leader.size()));
      for (auto& host : Host::threads(ranks)) hosts.push_back(std::move(host));
    }
    topology = Topology::by_leader(leader);
    std::vector<Address> addresses;
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      doors.push_back(open_door(Address::parse("127.0.0.1"), {}));
      addresses.push_back(local_address(doors.back().beats.get()));
    }
    lost.resize(addresses.size()), unheard = lost, over.resize(addresses.size());
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      const size_t r = size_t(rank);
      hearts.push_back(std::make_unique<Heart>(Terms{"job", "1", "secret", 0}, rank, topology, addresses,
                                               std::move(doors[r].beats), *hosts[r]));
      hearts.back()->listen({[this, r](int host) { lost[r].push_back(host); },
                             [this, r](int host) { unheard[r].push_back(host); },
                             [this, r](Code code, const std::string& text) { over[r] = {code, text}; }});
    }
  }
  void run(uint64_t ns, const std::vector<int>& ranks) {
    for (const uint64_t end = now + ns; now < end; now += kBeatNs)
      for (int rank : ranks) hearts[size_t(rank)]->tick(now);
  }
  Topology topology;
  std::vector<std::unique_ptr<Host>> hosts;
  std::vector<Door> doors;
  std::vector<std::unique_ptr<Heart>> hearts;
  std::vector<std::vector<int>> lost, unheard;
  std::vector<std::pair<Code, std::string>> over;
  uint64_t now = now_ns();
};
constexpr uint64_t kSecond = 1'000'000'000;

TEST(Heart, AHostThatBeatsNoMoreIsLostInUnderFiveSeconds) {
  Hearts hearts({1, 1, 1});
  hearts.run(10 * kSecond, {0, 1, 2});
  EXPECT_TRUE(hearts.lost[0].empty() && hearts.lost[1].empty());
  hearts.run(3 * kSecond, {0, 1});
  EXPECT_TRUE(hearts.lost[0].empty()) << "a cut of three seconds is survived";
  hearts.run(1750'000'000, {0, 1});
  EXPECT_EQ(hearts.lost[0], std::vector<int>{2});
  EXPECT_EQ(hearts.lost[1], std::vector<int>{2});
}

TEST(Heart, AStoppedRanksMatesGoOnForItsHost) {
  Hearts hearts({2, 1});
  hearts.run(2 * kSecond, {0, 1, 2});
  hearts.run(10 * kSecond, {1, 2});  // rank 0 is stopped
  EXPECT_TRUE(hearts.lost[2].empty());
}

TEST(Heart, WhereNothingEverComesItSaysSo) {
  Hearts hearts({1, 1});
  hearts.run(6 * kSecond, {0});
  EXPECT_TRUE(hearts.lost[0].empty());
  EXPECT_EQ(hearts.unheard[0], std::vector<int>{1});
}

TEST(Heart, EveryRankElsewhereHearsWhyTheEpochEnds) {
  Hearts hearts({2, 2});
  hearts.run(kSecond, {0, 1, 2, 3});
  hearts.hearts[1]->tell(Code::timeout, "it stalled", hearts.now);
  hearts.run(kBeatNs, {2, 3});
  for (size_t rank : {2, 3}) {
    EXPECT_EQ(hearts.over[rank].first, Code::timeout);
    EXPECT_EQ(hearts.over[rank].second, "it stalled");
  }
  hearts.run(10 * kSecond, {2, 3});
  EXPECT_TRUE(hearts.lost[2].empty()) << "who has said that it is over is not missed";
}

TEST(Heart, AHostThatLeftInPeaceIsNotMissed) {
  Hearts hearts({1, 1});
  hearts.run(kSecond, {0, 1});
  hearts.hearts[1]->tell(Code::ok, "", hearts.now);
  hearts.run(10 * kSecond, {0});
  EXPECT_TRUE(hearts.lost[0].empty());
  EXPECT_EQ(hearts.over[0].second, "");
}

TEST(Heart, TellsWhenRanksElsewhereLookedAround) {
  Hearts hearts({1, 2});
  hearts.hosts[1]->header(1).awake_ns = hearts.now - kSecond;
  hearts.run(kBeatNs, {1});
  hearts.hearts[0]->tick(hearts.now);
  EXPECT_EQ(hearts.hearts[0]->awake_ns_ago(1, hearts.now), std::nullopt);
  const auto ago = hearts.hearts[0]->awake_ns_ago(2, hearts.now);
  ASSERT_TRUE(ago);
  EXPECT_NEAR(double(*ago), 1.25e9, 0.3e9);
}

}  // namespace
}  // namespace lightcc
