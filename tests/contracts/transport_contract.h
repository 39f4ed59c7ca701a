// What every Transport between hosts must do beside its links (link_contract.h). A transport adds a row:
//   struct HarpCluster : TransportCluster { explicit HarpCluster(int ranks); };
//   INSTANTIATE_TYPED_TEST_SUITE_P(Harp, TransportContract, HarpCluster);
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "unit/helpers.h"
#include "net/transport.h"

namespace lightcc {

// The transports of so many ranks, each on a host of its own, in one thread.
struct TransportCluster {
  static constexpr uint64_t kMostNs = 20'000'000'000;

  static std::string name_of(int rank) {
    return "rank " + std::to_string(rank) + " on host h" + std::to_string(rank);
  }
  std::unique_ptr<Link> link(int from, int to, int group = 0, int lane = 0) {
    return ranks[size_t(from)]->link(group, lane, to);
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
  bool send(Link& link, uint64_t word) {
    std::byte* room = nullptr;
    if (!until([&] { return (room = link.reserve(sizeof word)) != nullptr; })) return false;
    std::memcpy(room, &word, sizeof word);
    link.commit(sizeof word);
    return true;
  }
  bool receive(Link& link, uint64_t word) {
    const std::byte* record = nullptr;
    if (!until([&] { return (record = link.peek(sizeof word)) != nullptr; })) return false;
    const bool is_it = std::memcmp(record, &word, sizeof word) == 0;
    link.consume(sizeof word);
    return is_it;
  }
  bool pass(Link& from, Link& to, uint64_t word) { return send(from, word) && receive(to, word); }
  // What step() of a rank throws, "" if nothing for so long.
  std::string thrown_by(int rank, Code expected, uint64_t most_ns = kMostNs) {
    try {
      for (const uint64_t deadline = now_ns() + most_ns; now_ns() < deadline;) {
        ranks[size_t(rank)]->step();
        ranks[size_t(rank)]->flush();
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), expected) << error.what();
      return error.what();
    }
    return "";
  }
  std::vector<std::unique_ptr<Transport>> ranks;
};

template <class Cluster> class TransportContract : public testing::Test {};
TYPED_TEST_SUITE_P(TransportContract);

TYPED_TEST_P(TransportContract, LinksOfPeersGroupsAndLanesAreApart) {
  TypeParam cluster(3);
  uint64_t word = 0;
  for (int group : {0, 5})
    for (int lane : {Transport::kControl, 0, 1})
      for (const auto& [a, b] : {std::pair{0, 1}, {0, 2}, {2, 1}}) {
        const auto from = cluster.link(a, b, group, lane), to = cluster.link(b, a, group, lane);
        ASSERT_TRUE(cluster.pass(*from, *to, ++word));
        ASSERT_TRUE(cluster.pass(*to, *from, ++word));
      }
}

TYPED_TEST_P(TransportContract, WhatWasCommittedIsDeliveredBeforeTheEnd) {
  TypeParam cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  constexpr uint64_t kWords = 100;
  for (uint64_t word = 0; word < kWords; ++word) ASSERT_TRUE(cluster.send(*from, word));
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
  cluster.ranks[0]->close();
  cluster.ranks[0].reset();
  cluster.ranks[1]->mark_left(0);
  for (uint64_t word = 0; word < kWords; ++word) ASSERT_TRUE(cluster.receive(*to, word)) << word;
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[1]->finish(); }));
}

TYPED_TEST_P(TransportContract, WhatALeaverHasCommittedIsReceivedThoughItIsMarkedBeforeTheyConnect) {
  TypeParam cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.send(*from, 7));
  cluster.ranks[1]->mark_left(0);
  EXPECT_TRUE(cluster.receive(*to, 7));
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
}

TYPED_TEST_P(TransportContract, WhoHasLeftIsNoLoss) {
  TypeParam cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  cluster.ranks[1]->mark_left(0);
  ASSERT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish(); }));
  cluster.ranks[0]->close();
  EXPECT_EQ(cluster.thrown_by(1, Code::ok, 100'000'000), "");
  EXPECT_EQ(to->peek(8), nullptr);
}

TYPED_TEST_P(TransportContract, ThePeersCauseIsHeard) {
  TypeParam cluster(2);
  const auto from = cluster.link(0, 1), to = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*to, *from, 1));
  cluster.ranks[0]->end(Error(Code::timeout, "the stall of tensor 'x' was ended"));
  std::string heard;
  for (const uint64_t deadline = now_ns() + cluster.kMostNs; heard.empty() && now_ns() < deadline;) {
    cluster.ranks[0]->step();
    heard = cluster.thrown_by(1, Code::timeout, 1'000'000);
  }
  EXPECT_TRUE(contains(heard, "the stall of tensor 'x' was ended")) << heard;
}

TYPED_TEST_P(TransportContract, ARetiredGroupIsDeliveredAndForgotten) {
  TypeParam cluster(2);
  auto from = cluster.link(0, 1, 3), to = cluster.link(1, 0, 3);
  ASSERT_TRUE(cluster.pass(*from, *to, 1));
  from.reset(), to.reset();
  for (auto& rank : cluster.ranks) rank->retire(3);
  for (int turn = 0; turn < 200; ++turn) cluster.step();
  const auto next = cluster.link(0, 1, 4), its_end = cluster.link(1, 0, 4);
  ASSERT_TRUE(cluster.pass(*next, *its_end, 2));
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish() && cluster.ranks[1]->finish(); }));
}

// As a send or a receive for which the peer has no counterpart.
TYPED_TEST_P(TransportContract, ALinkThatOneSideAloneHasUsedEndsWithItsGroup) {
  TypeParam cluster(2);
  const auto always = cluster.link(0, 1), its_end = cluster.link(1, 0);
  ASSERT_TRUE(cluster.pass(*its_end, *always, 1));
  int group = 3;
  for (const int user : {0, 1})
    for (const bool sends : {false, true})
      for (const int first : {0, 1}) {  // who retires it first; the other one may use it until then
        SCOPED_TRACE(testing::Message() << "rank " << user << (sends ? " sends, rank " : " waits, rank ") << first
                                        << " retires first");
        auto link = cluster.link(user, 1 - user, ++group);
        const auto use = [&] {
          if (!sends) {
            EXPECT_EQ(link->peek(8), nullptr);
          } else if (std::byte* room = link->reserve(8)) {
            std::memset(room, 1, 8), link->commit(8);
          }
          for (int turn = 0; turn < 200; ++turn) cluster.step();
        };
        use();
        if (user == first) link.reset();
        cluster.ranks[size_t(first)]->retire(group);
        if (user != first) use();
        link.reset();
        cluster.ranks[size_t(1 - first)]->retire(group);
        EXPECT_TRUE(cluster.until([&] { return !cluster.ranks[0]->busy() && !cluster.ranks[1]->busy(); }))
            << "it is still looked after";
        ASSERT_TRUE(cluster.pass(*always, *its_end, uint64_t(group)));
      }
  EXPECT_TRUE(cluster.until([&] { return cluster.ranks[0]->finish() && cluster.ranks[1]->finish(); }));
}

REGISTER_TYPED_TEST_SUITE_P(TransportContract, LinksOfPeersGroupsAndLanesAreApart,
                            WhatWasCommittedIsDeliveredBeforeTheEnd,
                            WhatALeaverHasCommittedIsReceivedThoughItIsMarkedBeforeTheyConnect, WhoHasLeftIsNoLoss,
                            ThePeersCauseIsHeard, ARetiredGroupIsDeliveredAndForgotten,
                            ALinkThatOneSideAloneHasUsedEndsWithItsGroup);

}  // namespace lightcc
