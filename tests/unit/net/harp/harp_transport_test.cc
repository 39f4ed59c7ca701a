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
#include "unit/helpers.h"
#include "contracts/link_contract.h"
#include "unit/stepped_link.h"
#include "contracts/transport_contract.h"

namespace lightcc {
namespace {

struct HarpCluster : TransportCluster {
  explicit HarpCluster(int n, const std::string& port = "udp", uint32_t peer_timeout_ms = 4'000) {
    std::vector<HarpPeer> peers;
    std::vector<HarpTransport*> made;
    for (int rank = 0; rank < n; ++rank) {
      const HarpOptions options{
          .port = port, .interface = port == "udp" ? "127.0.0.1" : "", .peer_timeout_ms = peer_timeout_ms};
      auto one = std::make_unique<HarpTransport>(options, rank, 7);
      peers.push_back({name_of(rank), one->address()});
      made.push_back(one.get());
      ranks.push_back(std::move(one));
    }
    for (HarpTransport* one : made) one->set_peers(peers);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Harp, TransportContract, HarpCluster);

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

TEST(HarpTransport, ThePeersCauseIsHeardThoughItClosesAtOnce) {
  HarpCluster cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
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
  const HarpOptions options{.interface = "127.0.0.1", .peer_timeout_ms = 2'000};
  const pid_t child = fork();
  if (child == 0) {
    HarpTransport transport(options, 0, 7);
    tell(to_parent[1], transport.address());
    transport.set_peers({{"rank 0", transport.address()}, {"rank 1", hear(to_child[0])}});
    const auto link = transport.link(0, 0, 1);
    for (;; transport.step())
      if (link->peek(8)) tell(to_parent[1], "heard"), link->consume(8);
  }
  close(to_parent[1]), close(to_child[0]);  // so that nobody waits for a child that has died
  HarpCluster cluster(0);
  cluster.ranks.push_back(nullptr);
  cluster.ranks.push_back(std::make_unique<HarpTransport>(options, 1, 7));
  auto& own = static_cast<HarpTransport&>(*cluster.ranks[1]);
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
  close(to_parent[0]), close(to_child[1]);
}

TEST(HarpTransport, WhoSleepsIsWokenByARecord) {
  HarpCluster cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  std::thread sender([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const uint64_t word = 2;
    std::memcpy(from->reserve(sizeof word), &word, sizeof word);
    from->commit(sizeof word);
    cluster.ranks[0]->flush();
  });
  const uint64_t deadline = now_ns() + cluster.kMostNs;
  while (!to->peek(8) && now_ns() < deadline) {
    cluster.ranks[1]->step();
    const uint64_t most_ns = std::min<uint64_t>(cluster.ranks[1]->arm(), cluster.kMostNs);
    pollfd one{cluster.ranks[1]->descriptor(), POLLIN, 0};
    poll(&one, 1, int(most_ns / 1'000'000));
  }
  sender.join();
  EXPECT_NE(to->peek(8), nullptr);
}

}  // namespace
}  // namespace lightcc
