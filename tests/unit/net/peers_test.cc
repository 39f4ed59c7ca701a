// Ranks of other hosts behind transports: which transport leads to whom, one sleep over all of them, and whole engines
// on a transport of the tests' own.
#include "net/peers.h"

#include <gtest/gtest.h>

#include <cstring>

#include "unit/ranks.h"

namespace lightcc {
namespace {

using namespace test;

// Three ranks, a host each; rank 0 has two transports, and the contacts say which of them leads where.
struct TwoNetworks {
  std::unique_ptr<Peers> peers_of(int rank, const std::vector<Contact>& contacts) {
    std::vector<NamedTransport> transports;
    transports.push_back({"first", first.transport(rank)});
    transports.push_back({"second", second.transport(rank)});
    return std::make_unique<Peers>(rank, hosts.topology, contacts, std::move(hosts.local_ranks[size_t(rank)]),
                                   std::move(transports), nullptr);
  }
  ThreadHosts hosts{{1, 1, 1}};
  LoopNetwork first{3}, second{3};
  const std::vector<Contact> contacts{
      {"rank 0", {{"first", ""}}}, {"rank 1", {{"second", ""}}}, {"rank 2", {{"second", ""}, {"first", ""}}}};
};

void send(Peers& peers, Link& link, char text) {
  std::byte* record = link.reserve(1);
  ASSERT_NE(record, nullptr);
  std::memcpy(record, &text, 1);
  link.commit(1);
  peers.flush_and_wake();
}
char received(Peers& peers, Link& link) {
  peers.step();
  const std::byte* record = link.peek(1);
  if (!record) return 0;
  const char text = char(*record);
  link.consume(1);
  return text;
}

TEST(Peers, ARankIsReachedThroughTheFirstTransportThatHasAnAddressOfIt) {
  TwoNetworks two;
  const auto peers = two.peers_of(0, two.contacts);
  for (int peer : {1, 2}) {
    auto link = peers->data_link(0, 0, peer);
    send(*peers, *link, 'x');
    EXPECT_EQ(two.first.link(peer, 0)->peek(1) != nullptr, peer == 2);
    EXPECT_EQ(two.second.link(peer, 0)->peek(1) != nullptr, peer == 1);
  }
  EXPECT_EQ(peers->name(2), "rank 2");
}

TEST(Peers, ARankWithoutAnAddressIsNamed) {
  TwoNetworks two;
  std::vector<Contact> contacts = two.contacts;
  contacts[2].addresses = {{"third", "somewhere"}};
  try {
    two.peers_of(0, contacts);
    FAIL() << "it has been reached";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::internal);
    EXPECT_STREQ(error.what(), "no transport leads to rank 2: no address of it is known");
  }
}

TEST(Peers, OneSleepEndsWhenAnyTransportHasSomething) {
  TwoNetworks two;
  const auto sleeper = two.peers_of(0, two.contacts);
  for (int peer : {1, 2}) {
    LoopNetwork& network = peer == 1 ? two.second : two.first;
    auto here = sleeper->data_link(0, 0, peer);
    std::thread sender([&] {
      while (sleeper->own().driver.polled.load() == 0) std::this_thread::yield();
      auto transport = network.transport(peer);
      auto there = transport->link(0, 0, 0);
      EXPECT_NE(there->reserve(1), nullptr);
      there->commit(1);
      transport->flush();
    });
    const uint64_t begin = now_ns();
    sleeper->sleep(Peers::Sleeper::caller, sleeper->own().driver, kPatienceNs, [] { return false; });
    EXPECT_LT(now_ns() - begin, kPatienceNs / 2);
    sender.join();
    EXPECT_TRUE(sleeper->step());
    EXPECT_NE(here->peek(1), nullptr) << peer;
  }
}

template <class MakePeers> void expect_that_lanes_do_not_mix(MakePeers make) {
  const auto all = make();
  std::unique_ptr<Link> here[2], there[2];
  for (int lane : {0, 1}) here[lane] = all[0]->data_link(3, lane, 1), there[lane] = all[1]->data_link(3, lane, 0);
  for (int lane : {1, 0}) {
    std::byte* record = nullptr;
    while (!(record = here[lane]->reserve(1))) all[0]->step();
    *record = std::byte('0' + lane);
    here[lane]->commit(1);
    all[0]->flush_and_wake();
  }
  for (int lane : {0, 1}) {
    char got = 0;
    for (const uint64_t deadline = now_ns() + kPatienceNs; !got && now_ns() < deadline;) {
      got = received(*all[1], *there[lane]);
      all[0]->step();
      all[0]->flush_and_wake();  // a connection may have come about only now
    }
    EXPECT_EQ(got, '0' + lane);
    EXPECT_EQ(there[lane]->peek(1), nullptr);
  }
}

TEST(Peers, LanesDoNotMix) {
  LoopNetwork network(2);
  expect_that_lanes_do_not_mix([] { return thread_peers({2}); });
  expect_that_lanes_do_not_mix([] { return thread_peers({1, 1}); });
  expect_that_lanes_do_not_mix([&] { return thread_peers({1, 1}, network); });
}

// ---- engines

const std::vector<int> kHosts{1, 2, 1};
constexpr int kSize = 4;
Ranks ranks_on(LoopNetwork& network, Config config = {}) { return Ranks(thread_peers(kHosts, network), config); }

TEST(EngineOnLoop, EveryKindWorksThoughLinksRefuseAndDelay) {
  for (size_t record_bytes : {100, 64 << 10}) {
    LoopNetwork network(kSize, {.record_bytes = record_bytes, .capacity = 2, .refuse = 0.3, .delay = 0.3});
    Ranks ranks = ranks_on(network);
    ranks.each([&](Engine& engine, int rank) {
      for (int64_t count : {1, 77, 5000}) {
        std::vector<float> sum(size_t(count), float(rank + 1));
        done(engine, request(engine, Kind::allreduce, "sum", {in_place(sum)}));
        EXPECT_EQ(sum, std::vector<float>(size_t(count), 10));
        std::vector<float> other(size_t(count), 1);
        auto grouped = request(engine, Kind::allreduce, "several", {in_place(sum), in_place(other)});
        done(engine, grouped);
        EXPECT_EQ(sum[0], 40);
        EXPECT_EQ(other.back(), 4);
      }
      const std::vector<int64_t> own(size_t(rank), rank);
      auto gather = done(engine, request(engine, Kind::allgather, "rows", {input_of(own, {rank})}));
      EXPECT_EQ(result<int64_t>(*gather), (std::vector<int64_t>{1, 2, 2, 3, 3, 3}));
      done(engine, request(engine, Kind::barrier, "", {}));
      const int odd = add_group(engine, {1, 3});
      if (rank % 2) {
        std::vector<int64_t> data{rank};
        done(engine, request(engine, Kind::allreduce, "of the odd", {in_place(data)}, odd));
        EXPECT_EQ(data[0], 4);
      }
      done(engine, request(engine, Kind::barrier, "before it goes", {}));
      remove_group(engine, odd);
    });
  }
}

// The lost rank itself may be the first to notice, and say so.
TEST(EngineOnLoop, ALostRankEndsTheOthersWithItsName) {
  LoopNetwork network(kSize);
  Ranks ranks = ranks_on(network);
  ranks.each([&](Engine& engine, int) { done(engine, request(engine, Kind::barrier, "all are here", {})); });
  network.lose(3);
  ranks.each({0, 1, 2}, [&](Engine& engine, int) {
    std::vector<float> data(8, 1);
    auto one = request(engine, Kind::allreduce, "data", {in_place(data)});
    EXPECT_EQ(outcome(engine, one), Code::peer_lost);
    EXPECT_NE(one->text.find("rank 3"), std::string::npos) << one->text;
    EXPECT_NE(one->text.find("the link is cut"), std::string::npos) << one->text;
  });
}

TEST(EngineOnLoop, AnInterruptReachesEveryRankWithItsCause) {
  LoopNetwork network(kSize);
  Ranks ranks = ranks_on(network);
  ranks.each([&](Engine& engine, int) { done(engine, request(engine, Kind::barrier, "all are here", {})); });
  ranks.each([&](Engine& engine, int rank) {
    if (rank == 1) return engine.abort("rank 1 was interrupted");
    std::vector<float> data(8, 1);
    auto one = request(engine, Kind::allreduce, "data", {in_place(data)});
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    EXPECT_NE(one->text.find("rank 1 was interrupted"), std::string::npos) << one->text;
  });
}

TEST(EngineOnLoop, ARankThatLeavesInPeaceIsNoLoss) {
  LoopNetwork network(kSize);
  Ranks ranks = ranks_on(network);
  ranks.each([&](Engine& engine, int) { done(engine, request(engine, Kind::barrier, "all are here", {})); });
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> data(8, 1);
    if (rank == 3) return engine.shutdown("its work is done");
    auto one = request(engine, Kind::allreduce, "more", {in_place(data)});
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    EXPECT_NE(one->text.find("has left (its work is done)"), std::string::npos) << one->text;
  });
}

}  // namespace
}  // namespace lightcc
