// HARP's transports of one process: the links' contract, and what happens when peers go.
#include "net/harp/harp_transport.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "helpers.h"
#include "link_contract.h"
#include "stepped_link.h"

namespace lightcc {
namespace {

constexpr uint64_t kMostNs = 20'000'000'000;

// n ranks, each on a host of its own.
struct HarpCluster {
  explicit HarpCluster(int n, const std::string& port = "udp", uint32_t peer_timeout_ms = 4'000) {
    std::vector<HarpPeer> peers;
    for (int rank = 0; rank < n; ++rank) {
      ranks.push_back(std::make_unique<HarpTransport>(
          HarpOptions{.port = port, .interface = port == "udp" ? "127.0.0.1" : "", .peer_timeout_ms = peer_timeout_ms},
          rank, 7));
      peers.push_back({"rank " + std::to_string(rank) + " on host h" + std::to_string(rank), ranks.back()->address()});
    }
    for (auto& rank : ranks) rank->set_peers(peers);
  }
  void step() {
    for (auto& rank : ranks)
      if (rank) rank->step(), rank->flush();
  }
  template <class Done> bool until(Done done) {
    for (const uint64_t deadline = now_ns() + kMostNs; now_ns() < deadline; step())
      if (done()) return true;
    return false;
  }
  // What step() of a rank throws, "" if nothing for so long.
  std::string thrown_by(int rank, Code expected) {
    try {
      for (const uint64_t deadline = now_ns() + kMostNs; now_ns() < deadline;) ranks[size_t(rank)]->step();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), expected) << error.what();
      return error.what();
    }
    return "";
  }
  std::vector<std::unique_ptr<HarpTransport>> ranks;
};

template <int kLane, bool kShared> struct HarpPair {
  HarpPair()
      : a_(cluster, mutex, cluster.ranks[0]->link(0, kLane, 1)),
        b_(cluster, mutex, cluster.ranks[1]->link(0, kLane, 0)) {}
  Link& a() { return a_; }
  Link& b() { return b_; }
  HarpCluster cluster{2, kShared ? "shm" : "udp"};
  std::mutex mutex;
  SteppedLink<HarpCluster> a_, b_;
};
using HarpUdpPair = HarpPair<0, false>;
using HarpShmPair = HarpPair<Transport::kControl, true>;
INSTANTIATE_TYPED_TEST_SUITE_P(HarpUdp, LinkContract, HarpUdpPair);
INSTANTIATE_TYPED_TEST_SUITE_P(HarpShm, LinkContract, HarpShmPair);

TEST(HarpFrames, AreReadWholeOrRefused) {
  const std::string hello = frame_of(HarpHello{7, 1, Transport::kControl, 3, 2}), said = std::string(2000, 'x');
  ASSERT_TRUE(hello_in(hello));
  EXPECT_EQ(frame_of(*hello_in(hello)), hello);
  const std::string notice = frame_of(HarpNotice{Code::timeout, "a stall"});
  const std::string longest = frame_of(HarpNotice{Code::ok, said});
  EXPECT_EQ(notice_in(notice).why, "a stall");
  EXPECT_EQ(notice_in(notice).code, Code::timeout);
  EXPECT_LT(longest.size(), 1000u) << "it fits into a packet";
  EXPECT_EQ(said.find(notice_in(longest).why.substr(0, 800)), 0u);
  for (const std::string& frame : {hello, notice})
    for (const std::string& wrong : {frame + "x", frame.substr(1), frame.substr(0, frame.size() - 1), std::string()}) {
      EXPECT_FALSE(hello_in(wrong));
      EXPECT_THROW(notice_in(wrong), Error);
    }
  EXPECT_FALSE(hello_in(notice));
  EXPECT_THROW(notice_in(hello), Error);
}

// Sends a word from one rank to the other, which shall get it.
void pass(HarpCluster& cluster, Link& from, Link& to, uint64_t word) {
  std::byte* room = nullptr;
  ASSERT_TRUE(cluster.until([&] { return (room = from.reserve(sizeof word)) != nullptr; }));
  std::memcpy(room, &word, sizeof word);
  from.commit(sizeof word);
  const std::byte* record = nullptr;
  ASSERT_TRUE(cluster.until([&] { return (record = to.peek(sizeof word)) != nullptr; }));
  EXPECT_EQ(std::memcmp(record, &word, sizeof word), 0);
  to.consume(sizeof word);
}

TEST(HarpTransport, LinksOfPeersGroupsAndLanesAreApart) {
  HarpCluster cluster(3);
  uint64_t word = 0;
  for (int group : {0, 5})
    for (int lane : {Transport::kControl, 0, 1})
      for (const auto& [a, b] : {std::pair{0, 1}, {0, 2}, {2, 1}}) {
        const auto from = cluster.ranks[size_t(a)]->link(group, lane, b);
        const auto to = cluster.ranks[size_t(b)]->link(group, lane, a);
        pass(cluster, *from, *to, ++word);
        pass(cluster, *to, *from, ++word);
      }
}

TEST(HarpTransport, WhatWasCommittedIsDeliveredBeforeTheEnd) {
  HarpCluster cluster(2);
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  constexpr uint64_t kWords = 100;
  for (uint64_t word = 0; word < kWords; ++word) {
    std::byte* room = nullptr;
    ASSERT_TRUE(cluster.until([&] { return (room = from->reserve(sizeof word)) != nullptr; }));
    std::memcpy(room, &word, sizeof word);
    from->commit(sizeof word);
  }
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
  cluster.ranks[0].reset();
  cluster.ranks[1]->mark_left(0);
  for (uint64_t word = 0; word < kWords; ++word) {
    const std::byte* record = nullptr;
    ASSERT_TRUE(cluster.until([&] { return (record = to->peek(sizeof word)) != nullptr; })) << word;
    EXPECT_EQ(std::memcmp(record, &word, sizeof word), 0);
    to->consume(sizeof word);
  }
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[1]->finish(); }));
}

TEST(HarpTransport, ThePeersCauseIsHeard) {
  HarpCluster cluster(2);
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  cluster.ranks[0]->end(Error(Code::timeout, "the stall of tensor 'x' was ended"));
  EXPECT_EQ(cluster.thrown_by(1, Code::timeout), "the stall of tensor 'x' was ended");
}

TEST(HarpTransport, ThePeersCauseIsHeardThoughItClosesAtOnce) {
  HarpCluster cluster(2);
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  std::thread other([&] {
    cluster.ranks[0]->end(Error(Code::timeout, "the stall of tensor 'x' was ended"));
    cluster.ranks[0]->close();
  });
  EXPECT_EQ(cluster.thrown_by(1, Code::timeout), "the stall of tensor 'x' was ended");
  other.join();
}

// A process of its own is rank 0: it tells its address, and sends a word in a while.
TEST(HarpTransport, APeerThatIsKilledIsNamed) {
  int to_parent[2], to_child[2];
  ASSERT_EQ(pipe(to_parent) + pipe(to_child), 0);
  const auto tell = [](int fd, const std::string& text) { return write(fd, text.data(), text.size()); };
  const auto hear = [](int fd) {
    char text[1000];
    return std::string(text, size_t(std::max<ssize_t>(0, read(fd, text, sizeof text))));
  };
  const HarpOptions options{.interface = "127.0.0.1", .peer_timeout_ms = 300};
  const pid_t child = fork();
  if (child == 0) {
    HarpTransport transport(options, 0, 7);
    tell(to_parent[1], transport.address());
    transport.set_peers({{"rank 0", transport.address()}, {"rank 1", hear(to_child[0])}});
    const auto link = transport.link(0, 0, 1);
    for (;; transport.step())
      if (link->peek(8)) tell(to_parent[1], "heard"), link->consume(8);
  }
  HarpCluster cluster(0);
  cluster.ranks.push_back(nullptr);
  cluster.ranks.push_back(std::make_unique<HarpTransport>(options, 1, 7));
  HarpTransport& own = *cluster.ranks[1];
  own.set_peers({{"rank 0 on host h0", hear(to_parent[0])}, {"rank 1", own.address()}});
  tell(to_child[1], own.address());
  const auto link = own.link(0, 0, 0);
  std::memcpy(link->reserve(8), "a word.", 8);
  link->commit(8);
  pollfd said{to_parent[0], POLLIN, 0};
  EXPECT_TRUE(cluster.until([&] { return poll(&said, 1, 0) == 1; }));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const std::string text = cluster.thrown_by(1, Code::peer_lost);
  EXPECT_TRUE(contains(text, "rank 0 on host h0 cannot be reached any more")) << text;
  for (const int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) close(fd);
}

TEST(HarpTransport, WhoHasLeftIsNoLoss) {
  HarpCluster cluster(2);
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  cluster.ranks[1]->mark_left(0);
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
  cluster.ranks[0].reset();
  for (const uint64_t deadline = now_ns() + 100'000'000; now_ns() < deadline;) cluster.step();
  EXPECT_EQ(to->peek(8), nullptr);
}

TEST(HarpTransport, ARetiredGroupIsDeliveredAndForgotten) {
  HarpCluster cluster(2);
  auto from = cluster.ranks[0]->link(3, 0, 1), to = cluster.ranks[1]->link(3, 0, 0);
  pass(cluster, *from, *to, 1);
  from.reset(), to.reset();
  for (auto& rank : cluster.ranks) rank->retire(3);
  for (int turn = 0; turn < 200; ++turn) cluster.step();
  const auto next = cluster.ranks[0]->link(4, 0, 1), its_end = cluster.ranks[1]->link(4, 0, 0);
  pass(cluster, *next, *its_end, 2);
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish() && cluster.ranks[1]->finish(); }));
}

TEST(HarpTransport, WhoSleepsIsWokenByARecord) {
  HarpCluster cluster(2);
  const auto from = cluster.ranks[0]->link(0, 0, 1), to = cluster.ranks[1]->link(0, 0, 0);
  pass(cluster, *to, *from, 1);
  std::thread sender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const uint64_t word = 2;
    std::memcpy(from->reserve(sizeof word), &word, sizeof word);
    from->commit(sizeof word);
    cluster.ranks[0]->flush();
  });
  const uint64_t deadline = now_ns() + kMostNs;
  while (!to->peek(8) && now_ns() < deadline) {
    cluster.ranks[1]->step();
    const uint64_t most_ns = std::min<uint64_t>(cluster.ranks[1]->arm(), kMostNs);
    pollfd one{cluster.ranks[1]->descriptor(), POLLIN, 0};
    poll(&one, 1, int(most_ns / 1'000'000));
  }
  sender.join();
  EXPECT_NE(to->peek(8), nullptr);
}

}  // namespace
}  // namespace lightcc
