// The ranks of a host as each sees them: connected as processes are, links of every group, the doorbell.
#include "net/shm/local_ranks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "net/bootstrap/connect.h"
#include "contracts/link_contract.h"

namespace lightcc {
namespace {

enum Which { control, data };

// The last group as well as the first: what lies behind a block of streams is another group's, or unmapped.
template <Which which, int group>
struct ShmPair {
  std::vector<std::unique_ptr<LocalRanks>> hosts = LocalRanks::threads(3);
  std::unique_ptr<Link> ends[2] = {end(1, 2), end(2, 1)};
  Link& a() { return *ends[0]; }
  Link& b() { return *ends[1]; }
  std::unique_ptr<Link> end(int from, int to) {
    LocalRanks& host = *hosts[size_t(from)];
    return which == control ? host.control_link(group, to) : host.data_link(group, 0, to);
  }
};
using Rows = testing::Types<ShmPair<control, 0>, ShmPair<data, 0>, ShmPair<control, LocalRanks::kGroups - 1>,
                            ShmPair<data, LocalRanks::kGroups - 1>>;
INSTANTIATE_TYPED_TEST_SUITE_P(Shm, LinkContract, Rows);

struct Connected {
  std::unique_ptr<LocalRanks> host;
  Code code = Code::ok;
  std::string text;
};

// One thread a rank; each with mappings of its own, as in processes of their own.
std::vector<Connected> connect_all(const std::vector<int>& sizes) {
  static int count = 0;
  const std::string job = "local_ranks_test/" + std::to_string(getpid()) + "/" + std::to_string(count++);
  std::vector<Connected> connected(sizes.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < sizes.size(); ++i)
    threads.emplace_back([&, i] {
      const std::string name = "rank " + std::to_string(i) + " on host h";
      try {
        connected[i].host = connect_local_ranks({job}, int(i), sizes[i], name, "note " + std::to_string(i),
                                                now_ns() + 10'000'000'000);
      } catch (const Error& error) {
        connected[i].code = error.code(), connected[i].text = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return connected;
}

TEST(LocalRanks, ConnectedRanksSeeEachOthersMemoryAndNames) {
  const auto ranks = connect_all({3, 3, 3});
  for (const Connected& rank : ranks) ASSERT_EQ(rank.text, "");
  for (int owner = 0; owner < 3; ++owner) {
    Arena& arena = *ranks[size_t(owner)].host->arena();
    std::byte* p = arena.allocate(100);
    p[99] = std::byte(owner + 1);
    for (const Connected& other : ranks) {
      EXPECT_EQ(other.host->base(owner)[arena.offset_of(p, 100) + 99], std::byte(owner + 1));
      EXPECT_EQ(other.host->name(owner), "rank " + std::to_string(owner) + " on host h");
      EXPECT_EQ(other.host->note(owner), "note " + std::to_string(owner));
    }
  }
  ranks[1].host->header(1).presence = Presence::left;
  EXPECT_EQ(ranks[2].host->header(1).presence, Presence::left);
  EXPECT_EQ(ranks[2].host->header(0).presence, Presence::here);
}

TEST(LocalRanks, EveryPeerButNotTheRankItselfIsWatched) {
  auto ranks = connect_all({3, 3, 3});
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(ranks[size_t(rank)].text, "");
    const auto pidfds = ranks[size_t(rank)].host->take_pidfds();
    ASSERT_EQ(pidfds.size(), 3u);
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(bool(pidfds[size_t(peer)]), peer != rank);
  }
}

TEST(LocalRanks, LinksWorkBetweenMappings) {
  const auto ranks = connect_all({2, 2});
  for (const Connected& rank : ranks) ASSERT_EQ(rank.text, "");
  auto a = ranks[0].host->data_link(5, 0, 1), b = ranks[1].host->data_link(5, 0, 0);
  std::memcpy(a->reserve(6), "hello", 6);
  a->commit(6);
  ASSERT_NE(b->peek(6), nullptr);
  EXPECT_STREQ(reinterpret_cast<const char*>(b->peek(6)), "hello");
}

TEST(LocalRanks, WorldsOfDifferentSizeAreRefused) {
  const auto ranks = connect_all({2, 3});
  for (const Connected& rank : ranks) {
    EXPECT_EQ(rank.code, Code::invalid_argument);
    EXPECT_EQ(rank.text, "init: rank 1 was started in a world of 3, rank 0 in one of 2");
  }
}

TEST(LocalRanks, AGroupThatWasResetBeginsAnew) {
  auto hosts = LocalRanks::threads(2);
  for (int again = 0; again < 2; ++again) {
    auto a = hosts[0]->control_link(3, 1), b = hosts[1]->control_link(3, 0);
    auto writer = hosts[0]->common_writer(3, 1, {0, 1});
    auto reader = hosts[1]->common_reader(3, 1, 0);
    EXPECT_EQ(b->peek(8), nullptr) << "left over from before";
    EXPECT_EQ(reader.peek(8), nullptr) << "left over from before";
    for (int record = 0; record < 3; ++record) {
      ASSERT_NE(a->reserve(8), nullptr);
      a->commit(8);
    }
    ASSERT_NE(writer.reserve(8), nullptr);
    writer.commit(8);
    ASSERT_NE(b->peek(8), nullptr);  // one of three is consumed
    b->consume(8);
    for (auto& host : hosts) host->reset_group(3);
  }
}

// ---- the doorbell

TEST(Doorbell, ARingEndsASleep) {
  Doorbell doorbell;
  std::atomic<bool> news{false};
  std::thread sleeper([&] {
    const uint64_t begin = now_ns();
    while (!news) doorbell.sleep(20'000'000'000, [&] { return news.load(); });
    EXPECT_LT(now_ns() - begin, 10'000'000'000u) << "it slept through the ring";
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  news.store(true);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  doorbell.ring();
  sleeper.join();
  EXPECT_EQ(doorbell.sleepers, 0u);
}

TEST(Doorbell, NobodySleepsLongerThanAskedOrDespiteNews) {
  Doorbell doorbell;
  const uint64_t begin = now_ns();
  doorbell.sleep(10'000'000, [] { return false; });
  EXPECT_GE(now_ns() - begin, 10'000'000u);
  doorbell.sleep(20'000'000'000, [] { return true; });
  EXPECT_LT(now_ns() - begin, 10'000'000'000u);
}

// Each waits for the other in turn, so one lost ring would cost a whole timeout.
TEST(Doorbell, NoRingIsLost) {
  constexpr int kTurns = 2000;
  Doorbell doorbells[2];
  std::atomic<int> turn{0};
  const uint64_t begin = now_ns();
  const auto play = [&](int me) {
    for (int i = me; i < kTurns; i += 2) {
      while (turn != i) doorbells[me].sleep(60'000'000'000, [&] { return turn == i; });
      turn = i + 1;
      std::atomic_thread_fence(std::memory_order_seq_cst);
      doorbells[1 - me].ring();
    }
  };
  std::thread other(play, 1);
  play(0);
  other.join();
  EXPECT_LT(now_ns() - begin, 60'000'000'000u);
}

}  // namespace
}  // namespace lightcc
