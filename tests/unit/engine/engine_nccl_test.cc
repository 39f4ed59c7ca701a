// Collectives of GPUs by NCCL: when it is used, what lies on another GPU, and how its failures and those of ranks end.
// That results are right is shown beside the way through the host (engine_gpu_test.cc).
#include "engine/run/nccl_setup.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "base/log.h"
#include "unit/gpus.h"
#include "labels.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

// ---- whether members use it

NcclSetup::Offer offer(int version, const std::string& bus_id, const std::string& why = "") {
  NcclSetup::Offer offer;
  offer.version = version;
  bus_id.copy(offer.bus_id.data(), offer.bus_id.size() - 1);
  why.copy(offer.why.data(), offer.why.size() - 1);
  return offer;
}

TEST(RefuseNccl, ARefusalNamesTheRanksThatCannot) {
  const Topology hosts = Topology::by_leader({0, 0, 2});
  const Group group(0, {2, 1, 0}, 0, hosts);  // member 0 alone on its host
  const auto good = offer(22703, "a");
  EXPECT_EQ(refuse_nccl(group, {good, good, offer(22703, "b")}), "");
  EXPECT_EQ(refuse_nccl(group, {good, offer(0, "a", "there is none"), good}), "rank 1: there is none");
  EXPECT_EQ(refuse_nccl(group, {good, good, offer(21805, "b")}),
            "rank 2 has version 2.27.3 and rank 0 has 2.18.5");
  EXPECT_EQ(refuse_nccl(group, {good, good, good}), "rank 1 and rank 0 have the same GPU (a)");
  auto one = good, other = good;  // with an NCCL_HOSTID
  one.host = 1, other.host = 2;
  EXPECT_EQ(refuse_nccl(group, {good, one, other}), "");
  EXPECT_EQ(refuse_nccl(group, {good, one, good}), "");
  EXPECT_EQ(refuse_nccl(group, {one, other, one}), "rank 2 and rank 0 have the same GPU (a)")
      << "NCCL takes them for ranks of one host, though we do not";
}

class Nccl : public GpuTest {
 protected:
  Nccl() { config_.nccl = true; }
  // Who ends the epoch waits until all ranks have been told that their part is queued.
  void await_all(int ranks) {
    ++queued_;
    while (queued_ < ranks) std::this_thread::yield();
  }
  // An all-reduce of ones, in place.
  void expect_sum(Engine& engine, int rank, int ranks, const std::string& name = "x") {
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    done(engine, on_gpu(engine, Kind::allreduce, name, {&x}, {&x}));
    EXPECT_EQ(x.read(), std::vector<float>(x.count, float(ranks)));
  }

  std::atomic<int> queued_{0};
};

TEST_F(Nccl, CommunicatorsAreMadeOnce) {
  Ranks ranks(std::vector<int>{2, 1}, config_);
  for (int i = 0; i < 3; ++i) {
    ranks.each([&](Engine& engine, int rank) { expect_sum(engine, rank, 3); });
    EXPECT_EQ(nccl_.leaks(), 3u);
  }
}

TEST_F(Nccl, WithoutItAllGoesThroughTheHost) {
  set_nccl(nullptr);
  config_.nccl_library = "/nowhere/libnccl.so.2";
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) { expect_sum(engine, rank, 2); });
  EXPECT_EQ(nccl_.leaks(), 0u);
}

// Tensors of the host and of GPUs, and what NCCL cannot do, take turns in one order.
TEST_F(Nccl, OthersGoThroughTheHostBesideIt) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 100, stream), y(*this, rank, 100, stream);
    std::vector<float> z(100, 1);
    for (int i = 0; i < 20; ++i) {
      x.fill(1), y.fill(float(rank)), std::ranges::fill(z, 1.0f);
      auto adasum = on_gpu(engine, Kind::allreduce, "y", {&y}, {&y});
      adasum->what.op = ReduceOp::adasum;
      const std::vector<RequestPtr> all = {on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}),
                                           request(engine, Kind::allreduce, "z", {in_place(z)}), adasum};
      for (const RequestPtr& one : all) engine.submit(one, false);
      for (const RequestPtr& one : all) EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
      EXPECT_EQ(x.read(), std::vector<float>(100, 2));
      EXPECT_EQ(z, std::vector<float>(100, 2));
      EXPECT_EQ(y.read()[99], 1.0f) << "of 0 and 1";
    }
  });
}

TEST_F(Nccl, AveragesAndFactorsAreThoseOfTheHost) {
  for (const bool by_nccl : {true, false}) {
    config_.nccl = by_nccl;
    Ranks ranks(3, config_);
    ranks.each([&](Engine& engine, int rank) {
      void* stream = stream_of(rank);
      GpuTensor x(*this, rank, 7, stream), y(*this, rank, 7, stream);
      x.fill(float(rank));
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&y});
      one->what.op = ReduceOp::average;
      one->what.pre = 3;
      one->what.post = 2;
      done(engine, one);
      EXPECT_EQ(y.read(), std::vector<float>(7, 6));
      auto scattered = on_gpu(engine, Kind::reducescatter, "r", {&x}, {});
      scattered->what.op = ReduceOp::average;
      done(engine, scattered);
      EXPECT_EQ(taken(*scattered), std::vector<float>(rank == 0 ? 3 : 2, 1));
    });
  }
}

// As slots of gradients lie: 25 and 40 floats, each padded to whole lines, in one piece of memory.
TEST_F(Nccl, PaddedNeighboursTravelTogetherWhereTheyAre) {
  constexpr size_t kSecond = 32, kAll = kSecond + 40;
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    for (const bool padded : {false, true}) {
      GpuTensor memory(*this, rank, kAll, stream);
      memory.fill(1);
      auto both = on_gpu(engine, Kind::allreduce, "x", {&memory, &memory}, {&memory, &memory}, {{25}, {40}});
      both->inputs[1] = both->outputs[1] = memory.data + kSecond;
      both->padded = padded;
      done(engine, request(engine, Kind::barrier, "", {}));  // the others copy no more
      if (padded)
        for (const char* copies : {"copy", "copy_all"}) cuda_.fail(copies, 1);
      done(engine, both);
      std::vector<float> expected(kAll, 2);
      for (size_t i = 25; i < kSecond; ++i) expected[i] = padded ? 2 : 1;
      EXPECT_EQ(memory.read(), expected) << (padded ? "padded" : "what lies between them is another's");
    }
  });
}

// The communicator is bound to the GPU of the first tensors.
TEST_F(Nccl, TensorsOfOtherGpusAreBroughtThere) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    expect_sum(engine, rank, 2);
    const int other = rank + 4;
    expect_sum(engine, other, 2);
    GpuTensor rows(*this, other, 4, stream_of(other));
    rows.fill(float(rank));
    EXPECT_EQ(taken(*done(engine, on_gpu(engine, Kind::allgather, "g", {&rows}, {}))),
              (std::vector<float>{0, 0, 0, 0, 1, 1, 1, 1}));
    EXPECT_EQ(taken(*done(engine, on_gpu(engine, Kind::reducescatter, "r", {&rows}, {}))), (std::vector<float>{1, 1}));
    auto one = on_gpu(engine, Kind::broadcast, "b", {&rows}, {&rows});
    one->what.root = 1;
    done(engine, one);
    EXPECT_EQ(rows.read(), std::vector<float>(4, 1));
    // Both in one request, and in one buffer.
    GpuTensor here(*this, rank, 4, stream_of(rank)), there(*this, other, 4, stream_of(other));
    here.fill(1), there.fill(2);
    const std::vector<RequestPtr> both = {on_gpu(engine, Kind::allreduce, "here", {&here}, {&here}),
                                          on_gpu(engine, Kind::allreduce, "there", {&there}, {&there})};
    for (const RequestPtr& each : both) engine.submit(each, false);
    for (const RequestPtr& each : both) EXPECT_EQ(finish(engine, each), Code::ok) << each->text;
    EXPECT_EQ(here.read(), std::vector<float>(4, 2));
    EXPECT_EQ(there.read(), std::vector<float>(4, 4));
  });
}

// ---- failures

TEST_F(Nccl, AFailureOfACallEndsTheEpochOnAll) {
  for (const char* function : {"AllReduce", "GroupEnd", "CommInitRankConfig", "GetUniqueId"}) {
    Ranks ranks(3, config_);
    nccl_.fail(function, 1, 3);
    std::atomic<int> named{0};
    ranks.each([&](Engine& engine, int rank) {
      GpuTensor x(*this, rank, 100, stream_of(rank));
      x.fill(1);
      // Who had queued its part sees the end with the next one.
      for (int i = 0; i < 100; ++i) {
        const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
        if (outcome(engine, one) == Code::ok) continue;
        if (one->text.find("NCCL") != std::string::npos) ++named;
        return;
      }
      ADD_FAILURE() << "rank " << rank << " saw no failure of " << function;
    });
    EXPECT_EQ(named, 3) << function;
  }
}

// Nobody calls while the GPU waits for others: the engine looks after it.
TEST_F(Nccl, AFailureBehindTheCallIsFound) {
  Ranks ranks(2, config_);
  std::atomic<bool> go_on{false};
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 100, stream);
    x.fill(1);
    if (rank == 1)
      cuda_.run(rank, stream, "a long kernel", {}, [&] {
        while (!go_on) std::this_thread::yield();
      });
    EXPECT_EQ(outcome(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x})), Code::ok) << "it is queued";
    await_all(2);
    if (rank == 0) {
      nccl_.set_async_error(0, 6);
      cuda_.synchronize(rank, stream);  // ends since the communicator is aborted, without a call of this rank
      EXPECT_NE(engine.failure(), "");
      EXPECT_NE(engine.failure().find("NCCL"), std::string::npos) << engine.failure();
      go_on = true;
    }
  });
}

// NCCL says only that a connection is gone.
TEST_F(Nccl, WhoHasDiedIsNamedWhereNcclNoticesFirst) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  std::atomic<bool> broken{false};
  ranks.each([&](Engine& engine, int rank) {
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    EXPECT_EQ(outcome(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x})), Code::ok);
    await_all(2);
    if (rank == 0) {
      nccl_.set_async_error(0, kNcclRemoteError);
      broken = true;
      const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      EXPECT_NE(outcome(engine, one), Code::ok);
      EXPECT_NE(one->text.find("it is gone"), std::string::npos) << one->text;
    } else {
      while (!broken) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that rank 0 hears of it from NCCL first
      engine.abort("it is gone");
    }
  });
}

TEST_F(Nccl, WhoHasLeftIsNamedWhereNcclNoticesThat) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    EXPECT_EQ(outcome(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x})), Code::ok);
    await_all(2);
    if (rank == 1) {
      engine.submit(on_gpu(engine, Kind::allreduce, "of rank 1 only", {&x}, {&x}), false);
      return engine.shutdown("it has gone");
    }
    nccl_.set_async_error(0, kNcclRemoteError);
    const auto one = on_gpu(engine, Kind::allreduce, "y", {&x}, {&x});
    EXPECT_EQ(outcome(engine, one), Code::shut_down);
    EXPECT_NE(one->text.find("it has gone"), std::string::npos) << one->text;
  });
}

TEST_F(Nccl, ARankThatDiesFreesTheStreamsOfTheOthers) {
  Ranks ranks(3, config_);
  std::atomic<bool> go_on{false};
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 100, stream);
    x.fill(1);
    if (rank == 2)
      cuda_.run(rank, stream, "a kernel that never ends", {}, [&] {
        while (!go_on) std::this_thread::yield();
      });
    EXPECT_EQ(outcome(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x})), Code::ok);
    await_all(3);
    if (rank == 2) return engine.abort("it is gone");
    cuda_.synchronize(rank, stream);
    if (rank == 0) go_on = true;
  });
}

// A rank that leaves in peace has queued what others need, and its program may yet look at its own results.
TEST_F(Nccl, WhatIsQueuedWhenARankLeavesIsCompleted) {
  Ranks ranks(3, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 100, stream);
    x.fill(1);
    if (rank > 0)
      cuda_.run(rank, stream, "a long kernel", {}, [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); });
    for (int i = 0; i < 2; ++i) done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
    engine.shutdown();
    EXPECT_EQ(x.read(), std::vector<float>(100, 9));
  });
}

TEST_F(Nccl, ManyMayBeQueued) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 10, stream);
    x.fill(1);
    cuda_.run(rank, stream, "a long kernel", {}, [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
    for (int i = 0; i < 100; ++i) done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
    EXPECT_EQ(x.read(), std::vector<float>(10, std::exp2f(100)));
  });
}

// ---- several streams

// A long kernel of the program, which one collective waits for, does not hold up those of the other streams.
TEST_F(Nccl, BatchesTakeTheStreamsByTurns) {
  config_.nccl_streams = 3;
  nccl_.set_kernels(3);
  Ranks ranks(std::vector<int>{2, 1}, config_);
  std::atomic<bool> go_on{false};
  std::atomic<int> read{0};
  ranks.each([&](Engine& engine, int rank) {
    void *held = stream_of(rank), *free = stream_of(rank);
    expect_sum(engine, rank, 3);  // on the first
    GpuTensor x(*this, rank, 10, held), y(*this, rank, 10, free), z(*this, rank, 10, free);
    for (GpuTensor* one : {&x, &y, &z}) one->fill(1);
    cuda_.run(rank, held, "a long kernel", {}, [&] {
      while (!go_on) std::this_thread::yield();
    });
    for (GpuTensor* one : {&x, &y, &z}) done(engine, on_gpu(engine, Kind::allreduce, "x", {one}, {one}));
    EXPECT_EQ(y.read(), std::vector<float>(10, 3));
    EXPECT_EQ(z.read(), std::vector<float>(10, 3));
    if (++read == 3) go_on = true;
    EXPECT_EQ(x.read(), std::vector<float>(10, 3));
  });
  EXPECT_EQ(nccl_.leaks(), 9u);
}

// ---- 2D

class Nccl2d : public Nccl {
 protected:
  Nccl2d() {
    nccl_.set_kernels(2);
    config_.nccl_2d = true;
  }
  static constexpr size_t kLarge = (1 << 18) + 3;  // floats, that 2D takes
  void expect_sums(Ranks& ranks) {
    ranks.each([&](Engine& engine, int rank) {
      void* stream = stream_of(rank);
      for (const size_t count : {kLarge, size_t(100)}) {
        GpuTensor x(*this, rank, count, stream), y(*this, rank, count, stream);
        x.fill(float(rank));
        auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&y});
        one->what.op = ReduceOp::average;
        done(engine, one);
        EXPECT_EQ(y.read(), std::vector<float>(count, float(ranks.size() - 1) / 2));
      }
    });
  }
};

TEST_F(Nccl2d, WhereAllNodesHaveEquallyManyMembers) {
  struct Case { std::vector<int> hosts; bool is_2d; };
  for (const auto& [hosts, is_2d] : {Case{{2, 2}, true}, {{2, 1}, false}, {{1, 1}, false}, {{4}, false}}) {
    Ranks ranks(hosts, config_);
    expect_sums(ranks);
    EXPECT_EQ(nccl_.leaks(), size_t(ranks.size() * (is_2d ? 3 : 1)));
  }
  config_.intra_size = 2;
  Ranks parts(4, config_);
  expect_sums(parts);
  EXPECT_EQ(nccl_.leaks(), 12u) << "two nodes on one host";
}

// So that two hosts of two ranks each can be seen with a single GPU.
TEST_F(Nccl2d, OnOneGpuWhereNcclTakesEachRankForAHost) {
  constexpr int kRanks = 4;
  nccl_.set_kernels(2 * kRanks);
  nccl_.set_host_ids();
  for (const bool has_ids : {true, false}) {
    std::vector<Config> configs(kRanks, config_);
    for (size_t rank = 0; rank < kRanks && has_ids; ++rank) configs[rank].nccl_host_id = "h" + std::to_string(rank);
    set_log(int(Level::info), true, 0, "h");
    testing::internal::CaptureStderr();
    Ranks ranks({2, 2}, configs);
    ranks.each([&](Engine& engine, int) {
      GpuTensor x(*this, 0, kLarge, stream_of(0));
      x.fill(1);
      done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
      EXPECT_EQ(x.read(), std::vector<float>(x.count, kRanks));
    });
    const std::string log = testing::internal::GetCapturedStderr();
    set_log(int(Level::warning), false, 0, "h");
    const char* expected = has_ids ? ", 2D for large all-reduces" : "rank 0 and rank 1 have the same GPU (double:0)";
    EXPECT_NE(log.find(expected), std::string::npos) << log;
    EXPECT_EQ(log.find("by NCCL") != std::string::npos, has_ids) << log;
    EXPECT_EQ(nccl_.leaks(), has_ids ? size_t(3 * kRanks) : 0u);
  }
}

TEST_F(Nccl2d, HasStreamsEnoughOfItsOwn) {
  config_.nccl_streams = 3;
  Ranks ranks(std::vector<int>{2, 2}, config_);
  expect_sums(ranks);
  EXPECT_EQ(nccl_.leaks(), 12u);
}

TEST_F(Nccl2d, NotWhereItIsNotWanted) {
  config_.hierarchical = false;
  Ranks ranks(std::vector<int>{2, 2}, config_);
  expect_sums(ranks);
  EXPECT_EQ(nccl_.leaks(), 4u);
}

TEST_F(Nccl2d, FailuresOfCallsEndTheEpochOnAll) {
  for (const auto& [function, calls] : {std::pair("ReduceScatter", 2), {"AllReduce", 3}, {"AllGather", 1},
                                        {"CommInitRankConfig", 7}, {"GetUniqueId", 3}}) {
    Ranks ranks(std::vector<int>{2, 2}, config_);
    nccl_.fail(function, calls, 3);
    ranks.each([&, function = function](Engine& engine, int rank) {
      GpuTensor x(*this, rank, kLarge, stream_of(rank));
      x.fill(1);
      for (int i = 0; i < 100; ++i) {
        const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
        if (outcome(engine, one) == Code::ok) continue;
        EXPECT_NE(one->text.find("NCCL"), std::string::npos) << one->text;
        return;
      }
      ADD_FAILURE() << "rank " << rank << " saw no failure of " << function;
    });
  }
}

TEST_F(Nccl2d, ARankThatDiesFreesTheStreamsOfTheOthers) {
  Ranks ranks(std::vector<int>{2, 2}, config_);
  std::atomic<bool> go_on{false};
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, kLarge, stream);
    x.fill(1);
    if (rank == 3)
      cuda_.run(rank, stream, "a kernel that never ends", {}, [&] {
        while (!go_on) std::this_thread::yield();
      });
    EXPECT_EQ(outcome(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x})), Code::ok) << "it is queued";
    await_all(4);
    if (rank == 3) return engine.abort("it is gone");
    cuda_.synchronize(rank, stream);
    if (rank == 0) go_on = true;
  });
}

// ---- process sets

// Each rank submits its sets' operations in an order of its own; a device runs one kernel at a time.
TEST_F(Nccl, CrossingProcessSetsAreLaunchedInOneOrder) {
  Ranks ranks(std::vector<int>{2, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    std::vector<int> sets = {0, add_group(engine, {0, 1}), add_group(engine, {1, 2}), add_group(engine, {2, 0})};
    const auto is_member = [&](size_t set) { return set == 0 || int(set - 1) == rank || int(set) % 3 == rank; };
    std::mt19937 random(unsigned(rank) + unsigned(cuda_.seed()));
    void* stream = stream_of(rank);
    for (int again = 0; again < 10; ++again) {
      std::vector<size_t> order = {0, 1, 2, 3};
      std::ranges::shuffle(order, random);
      std::vector<std::unique_ptr<GpuTensor>> tensors;
      std::vector<RequestPtr> requests;
      for (const size_t set : order) {
        if (!is_member(set)) continue;
        tensors.push_back(std::make_unique<GpuTensor>(*this, rank, 100, stream));
        tensors.back()->fill(1);
        requests.push_back(on_gpu(engine, Kind::allreduce, "x", {tensors.back().get()}, {tensors.back().get()}));
        requests.back()->group = sets[set];
        engine.submit(requests.back(), false);
      }
      for (size_t i = 0; i < requests.size(); ++i) {
        EXPECT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
        const float members = requests[i]->group == 0 ? 3 : 2;
        EXPECT_EQ(tensors[i]->read(), std::vector<float>(100, members));
      }
    }
  });
  EXPECT_EQ(nccl_.leaks(), 9u) << "the world's, and two of each set";
}

TEST_F(Nccl, WithoutItProcessSetsNeedNobodyElse) {
  config_.nccl = false;
  Ranks ranks(3, config_);
  std::atomic<bool> has_left{false};
  ranks.each([&](Engine& engine, int rank) {
    const int set = add_group(engine, {1, 2});
    if (rank == 0) {
      engine.shutdown();
      has_left = true;
      return;
    }
    while (!has_left) std::this_thread::yield();
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    one->group = set;
    done(engine, one);
    EXPECT_EQ(x.read(), std::vector<float>(100, 2));
  });
}

TEST_F(Nccl, WithoutItProcessSetsGoThroughTheHost) {
  config_.nccl = false;
  Ranks ranks(std::vector<int>{2, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const int alone = add_group(engine, {0}), some = add_group(engine, {2, 1});
    for (int again = 0; again < 3; ++again) {
      const int set = rank == 0 ? alone : some;
      GpuTensor x(*this, rank, 100, stream_of(rank));
      x.fill(1);
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->group = set;
      done(engine, one);
      EXPECT_EQ(x.read(), std::vector<float>(100, rank == 0 ? 1 : 2));
      expect_sum(engine, rank, 3);
    }
  });
}

TEST_F(Nccl, AProcessSetThatIsRemovedGivesItsCommunicatorsBack) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    for (int again = 0; again < 3; ++again) {
      const int set = add_group(engine, {1, 0});
      GpuTensor x(*this, rank, 100, stream_of(rank));
      x.fill(1);
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->group = set;
      done(engine, one);
      remove_group(engine, set);
      EXPECT_EQ(x.read(), std::vector<float>(100, 2));
      expect_sum(engine, rank, 2);
    }
  });
  for (int waited_ms = 0; nccl_.leaks() > 2 && waited_ms < 5000; ++waited_ms)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(nccl_.leaks(), 2u) << "the world's";
}

TEST_F(Nccl, WithoutTheRankThatOrdersItsLaunchesASetEndsByName) {
  Ranks ranks(3, config_);
  std::atomic<int> queued{0};
  ranks.each([&](Engine& engine, int rank) {
    const int set = add_group(engine, {1, 2});
    if (rank == 0) {
      while (queued < 2) std::this_thread::yield();
      return engine.shutdown();
    }
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    std::string text;
    for (int i = 0; i < 1000 && text.empty(); ++i) {
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->group = set;
      if (outcome(engine, one) != Code::ok) text = one->text;
      if (i == 0) ++queued;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace lightcc
