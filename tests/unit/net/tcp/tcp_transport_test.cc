// TCP transports of one process over loopback: the links' contract, and what happens when connections or peers go.
#include "net/tcp/tcp_transport.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/clock.h"
#include "contracts/link_contract.h"
#include "unit/loopback.h"
#include "unit/simulated.h"
#include "unit/stepped_link.h"
#include "contracts/transport_contract.h"

namespace lightcc {
namespace {

constexpr uint64_t kPatienceNs = 20'000'000'000;

JobCredentials credentials(const std::string& secret = "a secret") { return {"job", "1.0", secret, 0}; }

// n ranks, each on a host of its own.
struct Cluster {
  explicit Cluster(int n, const std::string& odd_secret = "", TcpTimeouts timeouts = {}) {
    std::vector<Fd> listeners;
    std::vector<TcpPeer> peers;
    for (int rank = 0; rank < n; ++rank) {
      listeners.push_back(listen_on_own_loopback());
      peers.push_back({"rank " + std::to_string(rank) + " on host h" + std::to_string(rank),
                       {local_address(listeners.back().get())}});
    }
    for (int rank = 0; rank < n; ++rank) {
      const bool odd = rank == n - 1 && !odd_secret.empty();
      ranks.push_back(std::make_unique<TcpTransport>(credentials(odd ? odd_secret : "a secret"), rank, peers,
                                                     std::move(listeners[size_t(rank)]), std::vector<Address>(),
                                                     timeouts));
    }
    if (n > 0) address = peers[0].addresses[0];
  }
  void step() {
    for (auto& rank : ranks)
      if (rank) rank->step(), rank->flush();
  }
  template <class Done> bool until(Done done) {
    for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline; step())
      if (done()) return true;
    return false;
  }
  // What step() throws, "" if nothing for so long.
  std::string thrown_within(uint64_t ns, Code* code = nullptr) {
    try {
      for (const uint64_t deadline = now_ns() + ns; now_ns() < deadline;) step();
    } catch (const Error& error) {
      if (code) *code = error.code();
      return error.what();
    }
    return "";
  }
  std::vector<std::unique_ptr<TcpTransport>> ranks;
  Address address;  // rank 0's
};

struct TcpCluster : TransportCluster {
  explicit TcpCluster(int n) {
    Cluster made(n);
    for (auto& rank : made.ranks) ranks.push_back(std::move(rank));
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Tcp, TransportContract, TcpCluster);

bool send(Cluster& cluster, Link& link, const std::string& text) {
  std::byte* to = nullptr;
  if (!cluster.until([&] { return (to = link.reserve(text.size())) != nullptr; })) return false;
  std::memcpy(to, text.data(), text.size());
  link.commit(text.size());
  return true;
}
std::string receive(Cluster& cluster, Link& link, size_t n) {
  const std::byte* from = nullptr;
  if (!cluster.until([&] { return (from = link.peek(n)) != nullptr; })) return "nothing came";
  std::string text(reinterpret_cast<const char*>(from), n);
  link.consume(n);
  return text;
}

using Stepped = SteppedLink<Cluster>;

template <int kLane> struct TcpPair {
  TcpPair()
      : a_(cluster, mutex, cluster.ranks[0]->link(0, kLane, 1)),
        b_(cluster, mutex, cluster.ranks[1]->link(0, kLane, 0)) {}
  Link& a() { return a_; }
  Link& b() { return b_; }
  Cluster cluster{2};
  std::mutex mutex;
  Stepped a_, b_;
};
INSTANTIATE_TYPED_TEST_SUITE_P(TcpData, LinkContract, TcpPair<0>);
INSTANTIATE_TYPED_TEST_SUITE_P(TcpControl, LinkContract, TcpPair<TcpTransport::kControl>);

// Those of this process with that port at either end.
std::vector<int> connections_of(int port) {
  std::vector<int> found;
  for (int fd = 0; fd < 1000; ++fd) {
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0 || peer.ss_family != AF_INET) continue;
    if (peer_address(fd).port() == port || local_address(fd).port() == port) found.push_back(fd);
  }
  return found;
}

// Loopback has an address for each: rank r's NIC i is 127.77.r.i.
TEST(TcpTransport, LanesTakeTheNicsInTurn) {
  const auto nic = [](int rank, int i) {
    return Address::parse("127.77." + std::to_string(rank) + "." + std::to_string(i + 1));
  };
  const auto nics = [&](int rank, int count, int port) {
    std::vector<Address> all;
    for (int i = 0; i < count; ++i) all.push_back(nic(rank, i).with_port(port));
    return all;
  };
  for (const auto& [here, there] : {std::pair{2, 2}, {3, 2}, {2, 3}, {1, 2}, {2, 1}, {0, 2}}) {
    Cluster cluster(0);
    std::vector<TcpPeer> peers;
    std::vector<Fd> listeners;
    for (int rank : {0, 1}) {
      listeners.push_back(listen_on(Address::parse("0.0.0.0"), {}));
      const int port = local_address(listeners.back().get()).port();
      peers.push_back({"rank " + std::to_string(rank), nics(rank, rank == 0 ? there : std::max(here, 1), port)});
    }
    const int port = peers[0].addresses[0].port();
    for (int rank : {0, 1})
      cluster.ranks.push_back(std::make_unique<TcpTransport>(credentials(), rank, peers,
                                                             std::move(listeners[size_t(rank)]),
                                                             nics(rank, rank == 0 ? there : here, 0)));
    const int both = std::min(std::max(here, 1), there);
    std::vector<std::unique_ptr<Link>> links;
    std::multiset<std::string> expected;
    for (const int lane : {TcpTransport::kControl, 0, 1, 2, 3}) {
      for (int rank : {0, 1}) links.push_back(cluster.ranks[size_t(rank)]->link(0, lane, 1 - rank));
      ASSERT_TRUE(send(cluster, *links.back(), "hello"));
      EXPECT_EQ(receive(cluster, *links[links.size() - 2], 5), "hello");
      const int way = lane < 0 ? 0 : (lane + 1) % both;
      expected.insert((here ? nic(1, way).text() : "somewhere") + " to " + nic(0, way).with_port(port).text());
    }
    std::multiset<std::string> connections;  // of this process to that port
    for (const int fd : connections_of(port)) {
      if (peer_address(fd).port() != port) continue;
      const std::string from = here ? local_address(fd).with_port(0).text() : "somewhere";
      connections.insert(from + " to " + peer_address(fd).text());
    }
    EXPECT_EQ(connections, expected) << here << " NICs to " << there;
  }
}

TEST(TcpTransport, LinksDoNotMix) {
  Cluster cluster(3);
  std::vector<std::pair<std::unique_ptr<Link>, std::string>> ends;
  for (int group : {0, 5})
    for (int lane : {TcpTransport::kControl, 0, 1})
      for (int peer : {1, 2}) {
        std::string text = std::to_string(group) + std::to_string(lane + 1) + std::to_string(peer);
        auto link = cluster.ranks[0]->link(group, lane, peer);
        ASSERT_TRUE(send(cluster, *link, text));
        ends.emplace_back(cluster.ranks[size_t(peer)]->link(group, lane, 0), text);
      }
  for (auto& [link, text] : ends) EXPECT_EQ(receive(cluster, *link, 3), text);
}

TEST(TcpTransport, APeerThatComesBeforeTheGroupExistsHereWaits) {
  Cluster cluster(2);
  auto early = cluster.ranks[1]->link(7, 0, 0);
  ASSERT_TRUE(send(cluster, *early, "early"));
  for (const uint64_t end = now_ns() + 100'000'000; now_ns() < end;) cluster.step();
  auto late = cluster.ranks[0]->link(7, 0, 1);
  EXPECT_EQ(receive(cluster, *late, 5), "early");
  EXPECT_EQ(cluster.ranks[0]->unauthenticated(), 0u);
}

TEST(TcpTransport, AConnectionThatBreaksIsReplacedAndLosesNothing) {
  Cluster cluster(2);
  auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
  for (int i = 0; i < 30; ++i) {
    const std::string there(1000 + size_t(i) * 7000, char('a' + i % 26)), back = "back" + std::to_string(i);
    ASSERT_TRUE(send(cluster, *a, there) && send(cluster, *b, back));
    if (i % 3 == 0) cluster.ranks[size_t(i) % 2]->break_connections();
    ASSERT_EQ(receive(cluster, *b, there.size()), there) << i;
    ASSERT_EQ(receive(cluster, *a, back.size()), back) << i;
  }
  EXPECT_GE(cluster.ranks[0]->reconnects(), 5u);
  EXPECT_EQ(cluster.ranks[0]->faults().reconnects, cluster.ranks[0]->reconnects());
  EXPECT_GT(cluster.ranks[0]->sent_bytes(), 30u * 1000);
}

TEST(TcpTransport, APeerThatIsGoneIsLostWithItsName) {
  for (int gone : {0, 1}) {
    Cluster cluster(2);
    auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
    ASSERT_TRUE(send(cluster, *a, "hello"));
    ASSERT_EQ(receive(cluster, *b, 5), "hello");
    (gone ? b : a).reset();
    cluster.ranks[size_t(gone)].reset();
    const uint64_t begin = now_ns();
    Code code{};
    const std::string text = cluster.thrown_within(kPatienceNs, &code);
    EXPECT_EQ(code, Code::peer_lost);
    const std::string number = std::to_string(gone);
    EXPECT_TRUE(text.starts_with("rank " + number + " on host h" + number + " died")) << text;
    EXPECT_LT(now_ns() - begin, 4'000'000'000u);
  }
}

TEST(TcpTransport, ARefusedConnectionIsNoDeathWhileThePeerIsHeardOf) {
  Cluster cluster(2);
  auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
  ASSERT_TRUE(send(cluster, *a, "hello"));
  ASSERT_EQ(receive(cluster, *b, 5), "hello");
  bool heard = true;
  cluster.ranks[1]->set_liveness_check([&](int peer, uint64_t since_ns) {
    EXPECT_TRUE(peer == 0 && since_ns < now_ns() && now_ns() - since_ns < 1'000'000'000);
    return heard;
  });
  a.reset();
  cluster.ranks[0].reset();
  EXPECT_EQ(cluster.thrown_within(2'000'000'000), "");
  heard = false;
  EXPECT_TRUE(cluster.thrown_within(500'000'000).starts_with("rank 0 on host h0 died"));
}

TEST(TcpTransport, AnAddressWhereNobodyEverListenedMayBeAWrongOne) {
  Cluster cluster(2);
  auto b = cluster.ranks[1]->link(0, 0, 0);
  cluster.ranks[0].reset();
  b->peek(1);
  const std::string text = cluster.thrown_within(kPatienceNs);
  EXPECT_TRUE(text.starts_with("rank 0 on host h0 cannot be reached: nobody listens at " + cluster.address.text()))
      << text;
  EXPECT_NE(text.find("LIGHTCC_IFACE"), std::string::npos) << text;
}

// Its system takes connections for it. Other ways tell whether it has died.
TEST(TcpTransport, AStoppedPeerWhoseConnectionBreaksIsAwaited) {
  for (int stopped : {0, 1}) {
    Cluster cluster(2, "", {.handshake_ns = 100'000'000, .reconnect_ns = 400'000'000});
    auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
    ASSERT_TRUE(send(cluster, *a, "hello"));
    ASSERT_EQ(receive(cluster, *b, 5), "hello");
    auto asleep = std::move(cluster.ranks[size_t(stopped)]);
    cluster.ranks[size_t(1 - stopped)]->break_connections();
    EXPECT_EQ(cluster.thrown_within(1'500'000'000), "");
    cluster.ranks[size_t(stopped)] = std::move(asleep);
    ASSERT_TRUE(send(cluster, *a, "again") && send(cluster, *b, "there"));
    EXPECT_EQ(receive(cluster, *b, 5) + receive(cluster, *a, 5), "againthere");
  }
}

TEST(TcpTransport, APeerOfWhichNothingWasHeardIsLookedFor) {
  Cluster cluster(2);
  cluster.ranks[0]->probe(1);
  EXPECT_EQ(cluster.thrown_within(1'500'000'000), "") << "it is there";
  cluster.ranks[1].reset();
  auto link = cluster.ranks[0]->link(0, 0, 1);
  EXPECT_EQ(link->peek(1), nullptr);
  EXPECT_EQ(cluster.thrown_within(1'500'000'000), "") << "the lower rank waits to be connected to";
  Cluster another(2);
  another.ranks[1].reset();
  another.ranks[0]->probe(1);
  Code code{};
  const std::string text = another.thrown_within(kPatienceNs, &code);
  EXPECT_EQ(code, Code::peer_lost);
  EXPECT_TRUE(text.starts_with("rank 1 on host h1 cannot be reached")) << text;
}

TEST(TcpTransport, APeerThatHasLeftInPeaceIsNoLoss) {
  Cluster cluster(2);
  auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
  ASSERT_TRUE(send(cluster, *b, "last words"));
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[1]->finish(); }));
  b.reset();
  cluster.ranks[1].reset();
  EXPECT_EQ(receive(cluster, *a, 10), "last words");
  EXPECT_EQ(cluster.thrown_within(1'500'000'000), "");
}

TEST(TcpTransport, WhoeverComesAfterTheEndHearsTheCause) {
  Cluster cluster(3);
  auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
  ASSERT_TRUE(send(cluster, *a, "hello"));
  ASSERT_EQ(receive(cluster, *b, 5), "hello");
  cluster.ranks[0]->end(Error(Code::timeout, "it stalled"));
  Code code{};
  EXPECT_NE(cluster.thrown_within(kPatienceNs, &code).find("it stalled"), std::string::npos);
  EXPECT_EQ(code, Code::timeout);
  auto c = cluster.ranks[2]->link(0, 0, 0);
  c->peek(1);
  EXPECT_NE(cluster.thrown_within(kPatienceNs).find("it stalled"), std::string::npos);
}

TEST(TcpTransport, AnotherSecretIsRefusedOnBothSides) {
  Cluster cluster(2, "another secret");
  auto b = cluster.ranks[1]->link(0, 0, 0);
  b->peek(1);
  EXPECT_NE(cluster.thrown_within(kPatienceNs).find("secret"), std::string::npos);
  auto a = cluster.ranks[0]->link(0, 0, 1);
  EXPECT_EQ(a->peek(1), nullptr);
}

TEST(TcpTransport, UnauthenticatedConnectionsAreCountedAndDisturbNobody) {
  Cluster cluster(2);
  std::vector<Fd> connections;
  for (int i = 0; i < 20; ++i) {
    Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(fd.get(), cluster.address.get(), cluster.address.length()), 0);
    const std::string text = i % 2 ? "GET / HTTP/1.1\r\n\r\n" : "";  // a scanner, and one that says nothing
    ASSERT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL), ssize_t(text.size()));
    connections.push_back(std::move(fd));
  }
  auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
  ASSERT_TRUE(send(cluster, *a, "hello"));
  EXPECT_EQ(receive(cluster, *b, 5), "hello");
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[0]->unauthenticated() == 20; }));  // the silent ones after 5 s
}

TEST(TcpTransport, LinksOfARetiredGroupAreForgotten) {
  Cluster cluster(2);
  for (int group : {1, 2}) {
    auto a = cluster.ranks[0]->link(group, 0, 1), b = cluster.ranks[1]->link(group, 0, 0);
    ASSERT_TRUE(send(cluster, *a, "hello"));
    ASSERT_EQ(receive(cluster, *b, 5), "hello");
    a.reset(), b.reset();
    for (auto& rank : cluster.ranks) rank->retire(group);
    EXPECT_EQ(cluster.thrown_within(200'000'000), "");
  }
  EXPECT_EQ(cluster.ranks[0]->reconnects() + cluster.ranks[1]->reconnects(), 0u);
}

TEST(TcpTransport, TheDescriptorIsReadableWhenSomethingComes) {
  Cluster cluster(2);
  auto a = cluster.ranks[0]->link(0, 0, 1), b = cluster.ranks[1]->link(0, 0, 0);
  ASSERT_TRUE(send(cluster, *a, "hello"));
  ASSERT_EQ(receive(cluster, *b, 5), "hello");
  for (const uint64_t end = now_ns() + 50'000'000; now_ns() < end;) cluster.step();
  EXPECT_EQ(cluster.ranks[1]->arm(), Pollable::kForever);
  EXPECT_FALSE(cluster.ranks[1]->busy());
  pollfd own{cluster.ranks[1]->descriptor(), POLLIN, 0};
  EXPECT_EQ(poll(&own, 1, 50), 0) << "nothing had come";
  std::memcpy(a->reserve(5), "again", 5);
  a->commit(5);
  cluster.ranks[0]->flush();
  EXPECT_EQ(poll(&own, 1, 10'000), 1);
  EXPECT_EQ(receive(cluster, *b, 5), "again");
}

// Whoever sleeps is woken for much at once where much is to come; little must not wait for more.
TEST(TcpTransport, WhateverComesWakesASleeper) {
  Cluster cluster(2);
  TcpTransport &a = *cluster.ranks[0], &b = *cluster.ranks[1];
  auto sender = a.link(0, 0, 1), receiver = b.link(0, 0, 0);
  ASSERT_TRUE(send(cluster, *sender, "hello"));
  ASSERT_EQ(receive(cluster, *receiver, 5), "hello");
  for (const int fd : connections_of(cluster.address.port())) {  // so that frames come in parts
    const int little = 16 << 10;
    ASSERT_EQ(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &little, sizeof little), 0);
  }
  int highest_mark = 0;
  const auto see_marks = [&] {
    for (const int fd : connections_of(cluster.address.port())) {
      int mark = 0;
      socklen_t length = sizeof mark;
      ASSERT_EQ(getsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &mark, &length), 0);
      highest_mark = std::max(highest_mark, mark);
    }
  };
  std::mt19937_64 random(test::run_seed());
  for (int round = 0; round < 10; ++round) {
    std::vector<size_t> sizes;
    for (size_t i = 1 + random() % 8; i > 0; --i)
      sizes.push_back(1 + random() % (random() % 2 ? 30'000 : sender->record_bytes()));
    size_t sent = 0, received = 0;
    for (const uint64_t deadline = now_ns() + kPatienceNs; received < sizes.size();) {
      ASSERT_LT(now_ns(), deadline) << "round " << round << ": nobody is woken for record " << received;
      for (size_t burst = random() % 6; burst > 0 && sent < sizes.size() && sender->reserve(sizes[sent]); --burst)
        sender->commit(sizes[sent++]);
      for (size_t turns = random() % 6; turns > 0; --turns) a.flush(), a.step();
      pollfd watched{b.descriptor(), POLLIN, 0};
      if (random() % 2 || poll(&watched, 1, 0) == 0) continue;
      b.step();
      see_marks();
      for (; received < sent && receiver->peek(sizes[received]); ++received) receiver->consume(sizes[received]);
      b.flush();
    }
  }
  EXPECT_GT(highest_mark, 1) << "it is woken for each segment";
}

// It has to be looked after, or nobody would notice that the peer is gone.
TEST(TcpTransport, ItIsBusyWhileAConnectionIsToComeAbout) {
  Cluster cluster(2);
  cluster.ranks[0].reset();
  auto b = cluster.ranks[1]->link(0, 0, 0);
  EXPECT_FALSE(cluster.ranks[1]->busy());
  b->peek(1);
  EXPECT_TRUE(cluster.ranks[1]->busy());
  EXPECT_LT(cluster.ranks[1]->arm(), 100'000'000u);
}

}  // namespace
}  // namespace lightcc
