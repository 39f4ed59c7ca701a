// Many connect who never prove to be of the job, or descriptors run out: ranks get through all the same, or the error
// says what was in their way.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <thread>

#include "base/clock.h"
#include "unit/child.h"
#include "unit/credentials.h"
#include "unit/helpers.h"
#include "unit/loopback.h"
#include "net/bootstrap/exchange.h"
#include "net/tcp/tcp_transport.h"
#include "net/unauthenticated.h"

namespace lightcc {
namespace {

std::vector<Fd> silent_connections(const Address& at, int count) {
  std::vector<Fd> all;
  for (int i = 0; i < count; ++i) {
    all.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(all.back().get(), at.get(), at.length()), 0) << i;
  }
  return all;
}
bool is_closed(const Fd& fd) {  // by the other end
  pollfd one{fd.get(), POLLIN, 0};
  return poll(&one, 1, 0) == 1;
}

struct Site {  // where rank 0 listens
  Fd listener = listen_on_own_loopback();
  Address at = local_address(listener.get());
  std::vector<Endpoint> endpoints{{own_loopback().text(), at.port()}};
};

// What one exchange of this rank came to: "" or the error, behind its code.
std::string exchange(int rank, int size, Site& site, uint64_t deadline_ns) {
  try {
    open_exchange(rank, size, kCredentials, site.endpoints, rank == 0 ? std::move(site.listener) : Fd())
        ->exchange("", deadline_ns);
  } catch (const Error& error) {
    return std::to_string(int(error.code())) + " " + error.what();
  }
  return "";
}

// ---- the decision

TEST(PendingConnections, TheOldestMakesRoomOnceThereAreTooMany) {
  PendingConnections pending(2);
  for (uint64_t key = 0; key < 258; ++key) {
    EXPECT_EQ(pending.surplus(), std::nullopt) << key;
    pending.add(key, key);
  }
  EXPECT_EQ(pending.surplus(), 0u);
  pending.remove(0), pending.remove(0), pending.remove(1);
  EXPECT_EQ(pending.surplus(), std::nullopt);
  pending.add(1000, 300), pending.add(0, 301);
  EXPECT_EQ(pending.surplus(), 2u);
}

TEST(PendingConnections, WhoMayStillBeAboutToProveItselfIsSparedWhereDescriptorsAreShort) {
  PendingConnections pending(2);
  EXPECT_EQ(pending.overdue(1000), std::nullopt);
  pending.add(7, 1000), pending.add(8, 1001);
  EXPECT_EQ(pending.overdue(1000 + PendingConnections::kGraceNs - 1), std::nullopt);
  EXPECT_EQ(pending.overdue(1000 + PendingConnections::kGraceNs), 7u);
}

// ---- at the exchange

TEST(ExchangeUnauthenticated, AreKeptUpToALimitAndTheOldestGoFirst) {
  Site site;
  const auto connections = silent_connections(site.at, 400);
  std::string said[2];
  std::thread client([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the last to come
    said[1] = exchange(1, 3, site, in_ms(4'000));
  });
  said[0] = exchange(0, 3, site, in_ms(4'000));
  client.join();
  EXPECT_TRUE(contains(said[0], "rank 2 did not come before HOROVOD_START_TIMEOUT (")) << said[0];
  EXPECT_TRUE(contains(said[0], "Unauthenticated connections")) << said[0];
  EXPECT_TRUE(contains(said[0], ": 400, the last from 127.0.0.1:")) << said[0];
  EXPECT_EQ(said[1], said[0]) << "rank 1 came, and heard who did not";
}

TEST(ExchangeUnauthenticated, TheOldestAreClosedWhileTheRanksMeet) {
  Site site;
  const auto connections = silent_connections(site.at, 400);
  std::string said[2];
  std::thread root([&] { said[0] = exchange(0, 2, site, in_ms(20'000)); });
  const uint64_t deadline = in_ms(10'000);
  while (!is_closed(connections[0]) && now_ns() < deadline) std::this_thread::yield();
  EXPECT_TRUE(is_closed(connections[0]));
  EXPECT_FALSE(is_closed(connections[399]));
  said[1] = exchange(1, 2, site, in_ms(20'000));
  root.join();
  EXPECT_EQ(said[0] + said[1], "");
}

TEST(ExchangeUnauthenticated, MoreThanThereAreDescriptorsEndNothing) {
  Site site;
  auto connections = silent_connections(site.at, 300);
  Child rank0(100, [&] {
    connections.clear();  // they are the parent's
    return exchange(0, 2, site, in_ms(30'000));
  });
  EXPECT_EQ(exchange(1, 2, site, in_ms(30'000)), "");
  EXPECT_EQ(rank0.said(), "");
}

TEST(ExchangeShortage, WhoeverWaitsIsTakenOnceThereAreDescriptors) {
  Site site;
  Child rank0(100, [&] {
    auto exchange = open_exchange(0, 2, kCredentials, {}, std::move(site.listener));
    std::vector<int> used;
    std::atomic<bool> begun{false}, full{false};
    std::thread later([&] {  // begins first: sanitizers take descriptors to look at a new thread
      for (begun = true; !full;) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      for (int fd : used) close(fd);
    });
    while (!begun) std::this_thread::yield();
    used = use_up_descriptors();
    full = true;
    std::string text;
    try {
      exchange->exchange("", in_ms(20'000));
    } catch (const Error& error) {
      text = error.what();
    }
    later.join();
    return text;
  });
  EXPECT_EQ(exchange(1, 2, site, in_ms(20'000)), "");
  EXPECT_EQ(rank0.said(), "");
}

TEST(ExchangeShortage, IsRankZerosOwnAndNotTheOthersFault) {
  Site site;
  Child rank0(100, [&] {
    auto exchange = open_exchange(0, 2, kCredentials, {}, std::move(site.listener));
    use_up_descriptors();
    try {
      exchange->exchange("", in_ms(3'000));
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  });
  site.listener = Fd();
  exchange(1, 2, site, in_ms(3'000));
  const std::string said = rank0.said();
  EXPECT_TRUE(contains(said, "rank 0 could not take the connections of rank 1 before HOROVOD_START_TIMEOUT ("))
      << said;
  EXPECT_TRUE(contains(said, "Too many open files; this process may have 100, raise the limit (ulimit -n)")) << said;
}

TEST(ExchangeShortage, ALimitThatCannotDoIsToldToAll) {
  Site site;
  Child rank0(50, [&] { return exchange(0, 2, site, in_ms(20'000)); });
  site.listener = Fd();
  const std::string client = exchange(1, 2, site, in_ms(20'000)), root = rank0.said();
  EXPECT_TRUE(contains(root, "rank 0 needs 66 descriptors to serve 2 ranks and may have 50")) << root;
  EXPECT_EQ(client, root);
}

// ---- at a rank's port

struct Two {  // ranks of two hosts
  explicit Two(TcpTimeouts timeouts) {
    Fd listeners[2];
    std::vector<TcpPeer> peers;
    for (int rank : {0, 1}) {
      listeners[rank] = listen_on_own_loopback();
      peers.push_back({"rank " + std::to_string(rank) + " on host h", {local_address(listeners[rank].get())}});
    }
    at = peers[0].addresses[0];
    for (int rank : {0, 1})
      ranks[rank] =
          std::make_unique<TcpTransport>(kCredentials, rank, peers, std::move(listeners[rank]),
                                         std::vector<Address>(), timeouts);
  }
  template <class Done> bool until(Done done, uint64_t ms = 10'000) {
    for (const uint64_t deadline = in_ms(ms); now_ns() < deadline;) {
      if (done()) return true;
      for (auto& rank : ranks)
        if (rank) rank->step(), rank->flush();
    }
    return false;
  }
  Address at;  // rank 0's
  std::unique_ptr<TcpTransport> ranks[2];
};
constexpr TcpTimeouts kVeryPatient{.handshake_ns = 60'000'000'000, .reconnect_ns = 60'000'000'000};

TEST(TcpUnauthenticated, ManyAtAPortKeepNoRankOut) {
  testing::internal::CaptureStderr();
  Two two(kVeryPatient);
  const auto connections = silent_connections(two.at, 400);
  EXPECT_TRUE(two.until([&] { return is_closed(connections[0]); }));
  auto a = two.ranks[0]->link(0, 0, 1), b = two.ranks[1]->link(0, 0, 0);
  EXPECT_TRUE(two.until([&] { return b->reserve(1) != nullptr; }));
  b->commit(1);
  EXPECT_TRUE(two.until([&] { return a->peek(1) != nullptr; }));
  EXPECT_FALSE(is_closed(connections[399]));
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "this rank's port is flooded: more than 258 connections")) << log;
}

TEST(TcpUnauthenticated, AreNamedInTheErrorOfALostPeer) {
  Two two({});
  const auto connections = silent_connections(two.at, 3);
  for (const Fd& fd : connections) EXPECT_EQ(send(fd.get(), "GET / HTTP/1.1\r\n", 16, MSG_NOSIGNAL), 16);
  EXPECT_TRUE(two.until([&] { return two.ranks[0]->unauthenticated() == 3; }));
  two.ranks[1].reset();
  two.ranks[0]->probe(1);
  std::string text;
  try {
    two.until([] { return false; });
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_TRUE(text.starts_with("rank 1 on host h cannot be reached: nobody listens")) << text;
  EXPECT_TRUE(contains(text, "as lightcc does: 3, the last from 127.0.0.1:")) << text;
}

}  // namespace
}  // namespace lightcc
