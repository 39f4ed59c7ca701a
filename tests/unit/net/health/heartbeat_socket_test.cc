// Heartbeats over real sockets, at times that the test makes up.
#include "net/health/heartbeat_socket.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <memory>
#include <set>

#include "base/clock.h"
#include "labels.h"
#include "unit/thread_peers.h"

LABEL(alone);

namespace lightcc {
namespace {

// Ranks that answer over TCP, or do not.
struct ScriptedProbes : HostProbes {
  explicit ScriptedProbes(const std::set<int>& ranks) : answering(ranks) {}
  void ask(int rank, uint64_t) override { asked.push_back(rank), news.push_back(rank); }
  std::vector<int> step(uint64_t) override {
    std::erase_if(news, [this](int rank) { return !answering.contains(rank); });
    return std::exchange(news, {});
  }
  int descriptor() const override { return -1; }
  const std::set<int>& answering;
  std::vector<int> asked, news;
};

struct Sockets {
  explicit Sockets(const std::vector<int>& ranks_of_hosts) : hosts(ranks_of_hosts) {
    for (int rank = 0; rank < hosts.size(); ++rank) {
      listen_sockets.push_back(open_listen_sockets(Address::parse("127.0.0.1"), {}));
      addresses.push_back(local_address(listen_sockets.back().heartbeats.get()));
    }
    lost.resize(addresses.size()), spared = unheard = lost, over.resize(addresses.size());
    for (int rank = 0; rank < hosts.size(); ++rank) {
      const size_t r = size_t(rank);
      auto one = std::make_unique<ScriptedProbes>(answering);
      probes.push_back(one.get());
      sockets.push_back(std::make_unique<HeartbeatSocket>(JobCredentials{"job", "1", "secret", 0}, rank,
                                                          hosts.topology, addresses,
                                                          std::move(listen_sockets[r].heartbeats),
                                                          *hosts.local_ranks[r], std::move(one)));
      sockets.back()->set_callbacks({[this, r](int host) { lost[r].push_back(host); },
                                     [this, r](int host) { spared[r].push_back(host); },
                                     [this, r](int host) { unheard[r].push_back(host); },
                                     [this, r](Code code, const std::string& text) { over[r] = {code, text}; }});
    }
  }
  void run(uint64_t ns, const std::vector<int>& ranks) {
    for (const uint64_t end = now + ns; now < end; now += kHeartbeatNs)
      for (int rank : ranks) sockets[size_t(rank)]->tick(now);
  }
  test::ThreadHosts hosts;
  std::vector<Address> addresses;
  std::vector<ListenSockets> listen_sockets;
  std::set<int> answering;                         // ranks, over TCP
  std::vector<ScriptedProbes*> probes;
  std::vector<std::unique_ptr<HeartbeatSocket>> sockets;
  std::vector<std::vector<int>> lost, spared, unheard;
  std::vector<std::pair<Code, std::string>> over;
  uint64_t now = now_ns();
};
constexpr uint64_t kSecond = 1'000'000'000;

TEST(HeartbeatSocket, AHostThatFallsSilentIsLostInUnderFiveSeconds) {
  Sockets all({1, 1, 1});
  all.run(10 * kSecond, {0, 1, 2});
  EXPECT_TRUE(all.lost[0].empty() && all.lost[1].empty());
  all.run(3 * kSecond, {0, 1});
  EXPECT_TRUE(all.lost[0].empty()) << "a cut of three seconds is survived";
  all.run(1750'000'000, {0, 1});
  EXPECT_EQ(all.lost[0], std::vector<int>{2});
  EXPECT_EQ(all.lost[1], std::vector<int>{2});
}

TEST(HeartbeatSocket, AHostWhoseDatagramsDoNotGetThroughIsNotLostWhileARankOfItAnswers) {
  Sockets all({2, 3});
  all.run(2 * kSecond, {0, 1, 2, 3, 4});
  EXPECT_TRUE(all.probes[0]->asked.empty()) << "nobody is asked for whom heartbeats speak";
  all.answering = {4};               // its mates are stopped
  all.run(20 * kSecond, {0, 1});
  for (size_t rank : {0, 1}) {
    EXPECT_TRUE(all.lost[rank].empty());
    EXPECT_EQ(all.spared[rank], std::vector<int>{1}) << "warned of once";
    EXPECT_FALSE(all.sockets[rank]->all_heard());
  }
  const auto& asked = all.probes[1]->asked;
  EXPECT_EQ(std::vector(asked.begin(), asked.begin() + 2), (std::vector{3, 4})) << "each begins with another one";
  all.answering = {};
  all.run(4750'000'000, {0, 1});
  EXPECT_EQ(all.lost[0], std::vector<int>{1});
  EXPECT_EQ(all.lost[1], std::vector<int>{1});
}

TEST(HeartbeatSocket, WhoHasEndedAsksNobody) {
  Sockets all({1, 1});
  all.run(2 * kSecond, {0, 1});
  all.sockets[0]->announce_end(Code::timeout, "it stalled", all.now);
  all.run(10 * kSecond, {0});
  EXPECT_TRUE(all.probes[0]->asked.empty());
}

TEST(HeartbeatSocket, AStoppedRanksMatesGoOnForItsHost) {
  Sockets all({2, 1});
  all.run(2 * kSecond, {0, 1, 2});
  all.run(10 * kSecond, {1, 2});     // rank 0 is stopped
  EXPECT_TRUE(all.lost[2].empty());
}

TEST(HeartbeatSocket, WhereNothingEverComesItSaysSo) {
  Sockets all({1, 1});
  all.run(6 * kSecond, {0});
  EXPECT_TRUE(all.lost[0].empty());
  EXPECT_EQ(all.unheard[0], std::vector<int>{1});
}

TEST(HeartbeatSocket, WhatCameBeforeTheSocketWasListenedToIsHeard) {
  test::ThreadHosts hosts({1, 1});
  const JobCredentials credentials{"job", "1", "secret", 0};
  ListenSockets of[2] = {open_listen_sockets(Address::parse("127.0.0.1"), {}),
                         open_listen_sockets(Address::parse("127.0.0.1"), {})};
  const std::vector<Address> addresses{local_address(of[0].heartbeats.get()), local_address(of[1].heartbeats.get())};
  const auto open = [&](int rank) {
    return std::make_unique<HeartbeatSocket>(credentials, rank, hosts.topology, addresses,
                                             std::move(of[rank].heartbeats), *hosts.local_ranks[size_t(rank)]);
  };
  const uint64_t now = now_ns();
  const auto early = open(1);
  early->tick(now);
  const auto late = open(0);
  std::vector<int> lost;
  late->set_callbacks({[&](int host) { lost.push_back(host); }, [](int) {}, [](int) {},
                       [](Code, const std::string&) {}});
  for (uint64_t ns = 0; ns < 5 * kSecond; ns += kHeartbeatNs) late->tick(now + ns);
  EXPECT_EQ(lost, std::vector<int>{1}) << "a host that is lost right after its first heartbeat is found";
}

TEST(HeartbeatSocket, EveryRankElsewhereHearsWhyTheEpochEnds) {
  Sockets all({2, 2});
  all.run(kSecond, {0, 1, 2, 3});
  all.sockets[1]->announce_end(Code::timeout, "it stalled", all.now);
  all.run(kHeartbeatNs, {2, 3});
  for (size_t rank : {2, 3}) {
    EXPECT_EQ(all.over[rank].first, Code::timeout);
    EXPECT_EQ(all.over[rank].second, "it stalled");
  }
  all.run(10 * kSecond, {2, 3});
  EXPECT_TRUE(all.lost[2].empty()) << "who has said that it is over is not missed";
}

TEST(HeartbeatSocket, WhatAnEarlierJobOfTheSameNameSecretAndPortsSaysIsNotBelieved) {
  Sockets all({1, 1});
  JobCredentials earlier{"job", "1", "secret", 0, {7}};
  const Heartbeat end{1, UINT64_MAX, {}, true, Code::peer_lost, "rank 3 died"};
  const std::string bytes = encode(end, heartbeat_key(earlier));
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const Address& to = all.addresses[0];
  ASSERT_EQ(sendto(socket.get(), bytes.data(), bytes.size(), 0, to.get(), to.length()), ssize_t(bytes.size()));
  all.run(kSecond, {0, 1});
  EXPECT_EQ(all.over[0].second, "");
  EXPECT_TRUE(all.sockets[0]->all_heard());
}

TEST(HeartbeatSocket, HoweverManyDatagramsOfStrangersComeNoHeartbeatIsLost) {
  Sockets all({1, 1});
  all.run(kSecond, {0, 1});
  const JobCredentials stranger{"job", "1", "another secret", 0, {7}};
  const std::string of_its_length = encode({1, UINT64_MAX, {0}, false, Code::ok, ""}, heartbeat_key(stranger));
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const Address& to = all.addresses[0];
  for (const std::string& bytes : {std::string(), of_its_length}) {
    for (const uint64_t end = all.now + 6 * kSecond; all.now < end;) {
      for (int i = 0; i < 1000; ++i)  // three times what fits into a socket's buffer
        ASSERT_GE(sendto(socket.get(), bytes.data(), bytes.size(), 0, to.get(), to.length()), 0);
      all.sockets[1]->tick(all.now);
      all.sockets[0]->tick(all.now);
      all.now += kHeartbeatNs;
    }
    EXPECT_TRUE(all.lost[0].empty());
  }
  EXPECT_EQ(all.sockets[0]->unauthenticated(), 0u);
  all.run(5 * kSecond, {0});
  EXPECT_EQ(all.lost[0], std::vector<int>{1}) << "a host that is really lost is found";
}

// Whoever reads along can send them again. What waits behind them must not count as heard when it is read at last.
TEST(HeartbeatSocket, HoweverManyOfItsOwnAreSentAgainAHostIsLostInUnderFiveSeconds) {
  Sockets all({1, 1});
  all.run(kSecond, {0, 1});
  const std::string again = encode({1, 1, {0}, false, Code::ok, ""}, heartbeat_key({"job", "1", "secret", 0}));
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const Address& to = all.addresses[0];
  const auto repeat = [&](int count) {
    while (count-- > 0) ASSERT_GE(sendto(socket.get(), again.data(), again.size(), 0, to.get(), to.length()), 0);
  };
  repeat(12'000);                    // more than the buffer holds
  all.run(kHeartbeatNs, {0});
  for (int i = 0; i < 8; ++i) {      // some get into the buffer
    all.sockets[1]->tick(all.now);
    repeat(1500);
    all.run(kHeartbeatNs, {0});
  }
  int ticks = 0;
  for (; all.lost[0].empty() && ticks < 40; ++ticks) {
    repeat(1500);
    all.run(kHeartbeatNs, {0});
  }
  EXPECT_LE(ticks, 17);
}

TEST(HeartbeatSocket, WhatBeginsAsAHeartbeatAndBringsNoProofIsCounted) {
  Sockets all({1, 1});
  std::string bytes = encode({1, 1, {0}, false, Code::ok, ""}, heartbeat_key({"job", "1", "secret", 0}));
  bytes.back() ^= 1;
  const Fd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const Address& to = all.addresses[0];
  ASSERT_EQ(sendto(socket.get(), bytes.data(), bytes.size(), 0, to.get(), to.length()), ssize_t(bytes.size()));
  all.run(kSecond, {0, 1});
  EXPECT_EQ(all.sockets[0]->unauthenticated(), 1u);
}

TEST(HeartbeatSocket, HeartbeatsAreCountedByNoClockSoOneThatIsSetBackSilencesNoHost) {
  Sockets all({1, 1});
  all.run(kSecond, {0, 1});
  all.sockets[1]->announce_end(Code::timeout, "it stalled", all.now - 20 * kSecond);
  all.run(kHeartbeatNs, {0});
  EXPECT_EQ(all.over[0].second, "it stalled");
}

TEST(HeartbeatSocket, AHostThatLeftInPeaceIsNotMissed) {
  Sockets all({1, 1});
  all.run(kSecond, {0, 1});
  all.sockets[1]->announce_end(Code::ok, "", all.now);
  all.run(10 * kSecond, {0});
  EXPECT_TRUE(all.lost[0].empty());
  EXPECT_EQ(all.over[0].second, "");
}

TEST(HeartbeatSocket, TellsWhenRanksElsewhereLookedAround) {
  Sockets all({1, 2});
  all.hosts.local_ranks[1]->header(1).awake_ns = all.now - kSecond;
  all.run(kHeartbeatNs, {1});
  all.sockets[0]->tick(all.now);
  EXPECT_EQ(all.sockets[0]->awake_ns_ago(1, all.now), std::nullopt);
  const auto ago = all.sockets[0]->awake_ns_ago(2, all.now);
  ASSERT_TRUE(ago);
  EXPECT_NEAR(double(*ago), 1.25e9, 0.3e9);
}

}  // namespace
}  // namespace lightcc
