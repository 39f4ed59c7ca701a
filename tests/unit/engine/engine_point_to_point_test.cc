// Sends and receives between engines: which belong together, in any order and size; what both sides hear if their
// tensors differ; and what becomes of those whose peer does not come, leaves or dies.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <latch>
#include <map>
#include <random>
#include <tuple>

#include "engine/run/peer_channel.h"
#include "labels.h"
#include "unit/helpers.h"
#include "unit/ranks.h"

LABEL(on_hosts);

namespace lightcc {
namespace {

using namespace test;
using std::chrono::milliseconds;

template <class T>
RequestPtr to_peer(Engine& engine, Kind kind, int peer, int tag, std::vector<T>& data, int group = 0) {
  auto one = request(engine, kind, "", {in_place(data)}, group);
  one->what.root = peer;
  one->tag = tag;
  return one;
}
template <class T> RequestPtr send(Engine& engine, int peer, int tag, std::vector<T>& data, int group = 0) {
  return to_peer(engine, Kind::send, peer, tag, data, group);
}
template <class T> RequestPtr receive(Engine& engine, int peer, int tag, std::vector<T>& data, int group = 0) {
  return to_peer(engine, Kind::receive, peer, tag, data, group);
}
RequestPtr submitted(Engine& engine, const RequestPtr& one) {
  engine.submit(one, false);
  return one;
}

// Around what fits into a frame, what goes along, a record, a run and a step.
constexpr size_t kSizes[] = {0, 1, 8, 9, 4000, PeerChannel::kAlongBytes / 4, PeerChannel::kAlongBytes / 4 + 1,
                             30'000, 1 << 18, (1 << 18) + 1, 3'000'001};

struct Letter {
  int from, to, tag;
  size_t count;
  float first;                   // the values count up from it
  bool is_whole(const std::vector<float>& data) const {
    for (size_t i = 0; i < data.size(); ++i)
      if (data[i] != first + float(i % 1000)) return false;
    return data.size() == count;
  }
  std::vector<float> data() const {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = first + float(i % 1000);
    return values;
  }
};

class PointToPointRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, PointToPointRanks, testing::Range(1, 5), testing::PrintToStringParamName());

// Everybody to everybody and to itself. Each rank submits its part in an order of its own, which only keeps that of
// sends, or receives, of one peer and tag, and waits in another.
TEST_P(PointToPointRanks, RandomOrdersAndSizes) {
  const int n = GetParam();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  std::vector<Letter> letters;
  for (int i = 0; i < 60 * n; ++i) {
    const size_t sizes = std::size(kSizes) - (i % 20 ? 3 : 0);
    letters.push_back({int(random() % unsigned(n)), int(random() % unsigned(n)), int(random() % 3) - 1,
                       kSizes[random() % sizes], float(i)});
  }
  std::vector<uint32_t> seeds;
  for (int rank = 0; rank < n; ++rank) seeds.push_back(random());
  Ranks ranks(n);
  ranks.each([&](Engine& engine, int rank) {
    std::mt19937 own(seeds[size_t(rank)]);
    std::map<std::tuple<Kind, int, int>, std::vector<const Letter*>> queues;  // by kind, peer and tag
    for (const Letter& one : letters) {
      if (one.from == rank) queues[{Kind::send, one.to, one.tag}].push_back(&one);
      if (one.to == rank) queues[{Kind::receive, one.from, one.tag}].push_back(&one);
    }
    std::vector<std::tuple<Kind, int, int>> order;
    for (auto& [key, queue] : queues) {
      order.insert(order.end(), queue.size(), key);
      std::reverse(queue.begin(), queue.end());
    }
    std::shuffle(order.begin(), order.end(), own);
    struct Moving {
      const Letter* letter;
      std::vector<float> data;
      RequestPtr request;
    };
    std::vector<std::unique_ptr<Moving>> moving;
    for (const auto& key : order) {
      const Letter* letter = queues[key].back();
      queues[key].pop_back();
      const Kind kind = std::get<0>(key);
      auto one = std::make_unique<Moving>(Moving{letter, letter->data(), nullptr});
      if (kind == Kind::receive) std::fill(one->data.begin(), one->data.end(), -1.0f);
      one->request = submitted(engine, to_peer(engine, kind, std::get<1>(key), std::get<2>(key), one->data));
      moving.push_back(std::move(one));
    }
    std::shuffle(moving.begin(), moving.end(), own);
    for (const auto& one : moving) {
      EXPECT_EQ(finish(engine, one->request), Code::ok) << one->request->text;
      EXPECT_TRUE(one->letter->is_whole(one->data)) << one->request->title() << ", " << one->letter->count;
    }
  });
}

TEST(PointToPoint, BothSendFirst) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    for (const size_t count : kSizes) {
      std::vector<float> out(count, float(rank)), in(count, -1);
      auto sent = submitted(engine, send(engine, 1 - rank, 7, out));
      auto received = submitted(engine, receive(engine, 1 - rank, 7, in));
      EXPECT_EQ(finish(engine, sent), Code::ok) << sent->text;
      EXPECT_EQ(finish(engine, received), Code::ok) << received->text;
      EXPECT_EQ(in, std::vector<float>(count, float(1 - rank)));
    }
  });
}

// A send is done once the receive has been submitted, and not before.
TEST(PointToPoint, ASendWaitsForItsReceiverWhileCollectivesGoOn) {
  Ranks ranks(3);
  std::barrier looked(2);
  ranks.each([&](Engine& engine, int rank) {
    const int pair = add_group(engine, {0, 2});
    std::vector<float> small(3, 5), large(1 << 20, 6);
    std::vector<RequestPtr> waiting;
    if (rank == 0)
      for (int tag : {1, 2})
        waiting = {submitted(engine, send(engine, 1, tag, small)), submitted(engine, send(engine, 1, tag, large))};
    for (int i = 0; i < 20; ++i) {
      std::vector<float> x(1000, 1);
      done(engine, request(engine, Kind::allreduce, "", {in_place(x)}));
      EXPECT_EQ(x[999], 3);
      if (rank != 1) done(engine, request(engine, Kind::allreduce, "", {in_place(x)}, pair));
    }
    if (rank == 0) {
      for (const RequestPtr& one : waiting) EXPECT_FALSE(engine.wait(*one, now_ns() + kSecondNs / 20)) << one->title();
      looked.arrive_and_wait();
      for (const RequestPtr& one : waiting) EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
    } else if (rank == 1) {
      looked.arrive_and_wait();
      for (int tag : {2, 1}) {
        std::vector<float> first(3), second(1 << 20);
        done(engine, receive(engine, 0, tag, first));
        done(engine, receive(engine, 0, tag, second));
        EXPECT_EQ(first, small);
        EXPECT_EQ(second, std::vector<float>(1 << 20, 6));
      }
    }
    done(engine, request(engine, Kind::barrier, "", {}));
  });
}

TEST(PointToPoint, ManyAreInFlightInBothDirections) {
  constexpr int kMany = 3000;
  Ranks ranks(2);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<int64_t> out(kMany), in(kMany);
    std::vector<RequestPtr> all;
    const auto one = [&](Kind kind, int64_t* at, int i) {
      auto request = test::request(engine, kind, "", {in_place(at, 1)});
      request->what.root = 1 - rank;
      request->tag = i % 5;
      all.push_back(submitted(engine, request));
    };
    for (int i = 0; i < kMany; ++i) out[size_t(i)] = 10 * i + rank;
    for (int i = 0; i < kMany; ++i) one(Kind::send, &out[size_t(i)], i);
    for (int i = 0; i < kMany; ++i) one(Kind::receive, &in[size_t(i)], i);
    for (const RequestPtr& request : all) ASSERT_EQ(finish(engine, request), Code::ok) << request->text;
    for (int i = 0; i < kMany; ++i) ASSERT_EQ(in[size_t(i)], 10 * i + 1 - rank);
  });
}

// As a program that blocks, one after the other.
TEST(PointToPoint, ForthAndBack) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    for (int i = 0; i < 300; ++i)
      for (const size_t count : {size_t(1), size_t(5000), size_t(i == 0 ? 2'000'000 : 20'000)}) {
        std::vector<float> data(count, rank == 0 ? float(i) : -1.0f);
        if (rank == 0) done(engine, send(engine, 1, 0, data)), data.assign(count, -1);
        if (rank == 1) done(engine, receive(engine, 0, 0, data));
        if (rank == 1) done(engine, send(engine, 0, 0, data));
        if (rank == 0) done(engine, receive(engine, 1, 0, data));
        ASSERT_EQ(data, std::vector<float>(count, float(i)));
      }
  });
}

// In either order, large and small; the next ones match.
TEST(PointToPoint, TensorsThatDifferFailOnBothSides) {
  Ranks ranks(2);
  std::barrier in_order(2);
  ranks.each([&](Engine& engine, int rank) {
    for (const size_t sent : {size_t(5), size_t(100'000)})
      for (const bool other_dtype : {false, true})
        for (const int first : {0, 1}) {
          std::vector<float> floats(sent, 1), fewer(3);
          std::vector<int32_t> numbers(sent);
          const std::string all = std::to_string(sent) + " elements of ";
          const std::string text = "ranks disagree on it: rank 0 (a thread) sends " + all +
                                   "float32, and rank 1 (a thread) receives " +
                                   (other_dtype ? all + "int32" : "3 elements of float32");
          if (rank != first) in_order.arrive_and_wait();
          auto one = submitted(engine, rank == 0 ? send(engine, 1, 4, floats) : other_dtype
                                                      ? receive(engine, 0, 4, numbers) : receive(engine, 0, 4, fewer));
          if (rank == first) in_order.arrive_and_wait();
          EXPECT_EQ(finish(engine, one), Code::mismatch);
          EXPECT_TRUE(contains(one->text, text)) << one->text;
          EXPECT_TRUE(one->text.starts_with(rank == 0 ? "send to rank 1 (tag 4): " : "recv from rank 0 (tag 4): "));
          std::vector<float> next(sent, rank == 0 ? 2.0f : 0.0f);
          done(engine, rank == 0 ? send(engine, 1, 4, next) : receive(engine, 0, 4, next));
          EXPECT_EQ(next, std::vector<float>(sent, 2));
        }
  });
}

TEST(PointToPoint, AGroupHasItsOwnAndRanksOfItsOwn) {
  Ranks ranks(3);
  ranks.each([](Engine& engine, int rank) {
    const int pair = add_group(engine, {1, 2});
    if (rank > 0) {
      const int me = rank - 1, peer = 1 - me;
      std::vector<float> of_world(1, 10), of_pair(1, 20), world_in(1), pair_in(1);
      const RequestPtr all[] = {submitted(engine, receive(engine, 3 - rank, 1, world_in)),
                                submitted(engine, receive(engine, peer, 1, pair_in, pair)),
                                submitted(engine, send(engine, peer, 1, of_pair, pair)),
                                submitted(engine, send(engine, 3 - rank, 1, of_world))};
      for (const RequestPtr& one : all) EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
      EXPECT_EQ(world_in[0], 10);
      EXPECT_EQ(pair_in[0], 20);
      std::vector<float> never(1);
      auto unmatched = submitted(engine, receive(engine, peer, 2, never, pair));
      remove_group(engine, pair);
      EXPECT_EQ(finish(engine, unmatched), Code::invalid_argument);
      EXPECT_EQ(unmatched->text, "recv from rank " + std::to_string(peer) + " of process set " + std::to_string(pair) +
                                     " (tag 2): its process set was removed");
    } else {
      remove_group(engine, pair);
    }
    // The slot of the group that was removed serves another, and begins anew.
    const int again = add_group(engine, {0, 2});
    EXPECT_EQ(again, pair);
    std::vector<float> data(50'000, rank == 0 ? 3.0f : 0.0f);
    if (rank == 0) done(engine, send(engine, 1, 2, data, again));
    if (rank == 2) done(engine, receive(engine, 0, 2, data, again));
    if (rank != 1) { EXPECT_EQ(data[49'999], 3); }
  });
}

TEST(PointToPoint, WhatCannotBe) {
  Ranks ranks(2);
  ranks.each([](Engine& engine, int rank) {
    std::vector<float> data(1);
    const auto refused = [&](const RequestPtr& one, const std::string& text) {
      EXPECT_EQ(outcome(engine, one), Code::invalid_argument);
      EXPECT_TRUE(contains(one->text, text)) << one->text;
    };
    for (const int peer : {-1, 2})
      refused(send(engine, peer, 0, data), "the peer is a rank within the process set, and set 0 has ranks 0 to 1");
    auto of_gpu = receive(engine, 0, 0, data);
    of_gpu->place.kind = DeviceKind::cuda;
    refused(of_gpu, "on rank " + std::to_string(rank) + ": send and recv take tensors in the host's memory");
  });
}

// ---- ends

TEST(PointToPoint, WhatARankHasSentArrivesAfterItHasLeft) {
  for (const size_t count : {size_t(10), size_t(2'000'000)}) {
    Ranks ranks(2);
    std::barrier has_left(2);
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> data(count, rank == 1 ? 4.0f : 0.0f), more(1);
      if (rank == 1) {
        done(engine, send(engine, 0, 0, data));
        return engine.shutdown("its work is done");
      }
      auto received = submitted(engine, receive(engine, 1, 0, data));
      auto never = submitted(engine, receive(engine, 1, 0, more));
      auto unread = submitted(engine, send(engine, 1, 9, more));
      EXPECT_EQ(finish(engine, received), Code::ok) << received->text;
      EXPECT_EQ(data, std::vector<float>(count, 4));
      for (const RequestPtr& one : {never, unread}) {
        EXPECT_EQ(finish(engine, one), Code::shut_down);
        EXPECT_EQ(one->text, one->title() + ": rank 1 (a thread) has left (its work is done)");
      }
      auto later = send(engine, 1, 0, more);
      EXPECT_EQ(outcome(engine, later), Code::shut_down);
      EXPECT_EQ(later->text, later->title() + ": rank 1 (a thread) has left (its work is done)");
    });
  }
}

// The others of a host hear of it from rank 0.
TEST(PointToPoint, ARankThatLeavesIsHeardOfAlsoWhereWhoWouldTellHasLeftBefore) {
  Ranks ranks(std::vector<int>{2, 1});
  std::barrier is_used(3);
  std::latch is_waited_for(1), has_left(1);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> data(10, float(rank));
    if (rank > 0) done(engine, rank == 2 ? send(engine, 1, 0, data) : receive(engine, 2, 0, data));
    is_used.arrive_and_wait();
    if (rank == 0) {
      engine.shutdown("its work is done");
      return has_left.count_down();
    }
    has_left.wait();
    if (rank == 2) {
      is_waited_for.wait();
      return engine.shutdown("its work is done, too");
    }
    auto never = submitted(engine, receive(engine, 2, 0, data));
    is_waited_for.count_down();
    EXPECT_EQ(finish(engine, never), Code::shut_down);
    EXPECT_TRUE(contains(never->text, never->title() + ": rank 2 (a thread) has left")) << never->text;
  });
}

TEST(PointToPoint, ARankThatLeavesWithOneInFlightFailsItAndItsPeers) {
  for (const size_t count : {size_t(1), size_t(2'000'000)}) {
    Ranks ranks(2);
    std::barrier all_sent(2);
    ranks.each([&](Engine& engine, int rank) {
      std::vector<float> data(count);
      done(engine, rank == 0 ? send(engine, 1, 0, data) : receive(engine, 0, 0, data));  // the link is up
      auto one = submitted(engine, send(engine, 1 - rank, 3, data));                     // nobody receives
      all_sent.arrive_and_wait();
      if (rank == 0) engine.shutdown("its program has ended");
      EXPECT_EQ(finish(engine, one), Code::shut_down);
      EXPECT_TRUE(contains(one->text, rank == 0 ? "send to rank 1 (tag 3): lightcc has been shut down on this rank"
                                                : "send to rank 0 (tag 3): rank 0 (a thread) has left (its program "
                                                  "has ended)")) << one->text;
    });
  }
}

TEST(PointToPoint, ADeadPeerIsNamed) {
  Ranks ranks(2);
  ranks.each({0}, [&](Engine& engine, int) {
    std::vector<float> data(1'000'000);
    auto sent = submitted(engine, send(engine, 1, 0, data)), received = submitted(engine, receive(engine, 1, 0, data));
    if (engine.topology().share_host(0, 1)) engine.peer_ended(1);
    else ranks[1].abort("rank 1 (a thread) died");
    for (const RequestPtr& one : {sent, received}) {
      const Code code = finish(engine, one);
      EXPECT_EQ(code, engine.topology().share_host(0, 1) ? Code::peer_lost : Code::shut_down);
      EXPECT_TRUE(contains(one->text, one->title() + ": rank 1 (a thread) died")) << one->text;
    }
  });
}

// In the middle of the data.
TEST(PointToPoint, AnAbortEndsATransferOnBothSides) {
  Ranks ranks(2);
  std::barrier both_submitted(2);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> data(20'000'000);
    auto one = submitted(engine, rank == 0 ? send(engine, 1, 0, data) : receive(engine, 0, 0, data));
    both_submitted.arrive_and_wait();
    if (rank == 0) engine.abort("a test ends it");
    const Code code = finish(engine, one);
    EXPECT_TRUE(code == Code::shut_down || code == Code::ok) << one->text;  // it may have been whole here
    if (code != Code::ok) { EXPECT_TRUE(contains(one->text, one->title() + ": a test ends it")) << one->text; }
  });
}

Config impatient() {
  Config config;
  config.stall_warn_s = 0.3, config.stall_end_s = 1.5;
  return config;
}

TEST(PointToPoint, AStallNamesWhoWaitsForWhomAndEndsInTime) {
  testing::internal::CaptureStderr();
  Ranks ranks(3, impatient());
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> data(1);
    if (rank == 0) return;
    auto one = rank == 1 ? send(engine, 2, 5, data) : receive(engine, 1, 6, data);  // tags differ
    EXPECT_EQ(outcome(engine, one), Code::timeout);
    EXPECT_TRUE(contains(one->text, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")) << one->text;
    EXPECT_TRUE(contains(one->text, " in send to rank 2 (tag 5) for rank 2 (a thread) to receive it") ||
                contains(one->text, " in recv from rank 1 (tag 6) for rank 1 (a thread) to send it")) << one->text;
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "stall: rank 1 (a thread) has waited ")) << log;
  EXPECT_TRUE(contains(log, "stall: rank 2 (a thread) has waited ")) << log;
  EXPECT_GE(ranks.count(Counters::stall_warnings), 2u);
}

TEST(PointToPoint, TwoThatWaitForTheirSendsBeforeTheyReceiveAreToldSo) {
  testing::internal::CaptureStderr();
  Ranks ranks(2, impatient());
  ranks.each([&](Engine& engine, int rank) {
    std::vector<float> data(100'000);
    auto one = send(engine, 1 - rank, 0, data);
    EXPECT_EQ(outcome(engine, one), Code::timeout) << one->text;
  });
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, "which sends to this rank in turn: one of the two must submit its recv before")) << log;
}

}  // namespace
}  // namespace lightcc
