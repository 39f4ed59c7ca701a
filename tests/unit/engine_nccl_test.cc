// Collectives of GPUs by NCCL: when it is used, what lies on another GPU, and how its failures and those of ranks end.
// That results are right is shown beside the way through the host (engine_gpu_test.cc).
#include "engine/nccl_setup.h"

#include <cmath>

#include "gpus.h"

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

TEST(RefuseNccl, SaysWhoCannot) {
  const Topology hosts = Topology::by_leader({0, 0, 2});
  const Group group(0, {2, 1, 0}, 0, hosts);  // member 0 alone on its host
  const auto good = offer(22703, "a");
  EXPECT_EQ(refuse_nccl(group, {good, good, offer(22703, "b")}), "");
  EXPECT_EQ(refuse_nccl(group, {good, offer(0, "a", "there is none"), good}), "rank 1: there is none");
  EXPECT_EQ(refuse_nccl(group, {good, good, offer(21805, "b")}),
            "rank 2 has version 2.27.3 and rank 0 has 2.18.5");
  EXPECT_EQ(refuse_nccl(group, {good, good, good}), "rank 1 and rank 0 have the same GPU (a)");
}

class Nccl : public GpuTest {
 protected:
  Nccl() { config_.nccl = true; }
  // An all-reduce of ones, in place.
  void expect_sum(Engine& engine, int rank, int ranks, const std::string& name = "x") {
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    done(engine, on_gpu(engine, Kind::allreduce, name, {&x}, {&x}));
    EXPECT_EQ(x.read(), std::vector<float>(x.count, float(ranks)));
  }
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
    if (rank == 0) {
      nccl_.set_async_error(0, 6);
      cuda_.synchronize(rank, stream);  // ends since the communicator is aborted, without a call of this rank
      EXPECT_NE(engine.failure(), "");
      EXPECT_NE(engine.failure().find("NCCL"), std::string::npos) << engine.failure();
      go_on = true;
    }
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

TEST_F(Nccl, ProcessSetsGoThroughTheHost) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    const int set = add_group(engine, {0, 1});
    GpuTensor x(*this, rank, 100, stream_of(rank));
    x.fill(1);
    auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    one->group = set;
    done(engine, one);
    EXPECT_EQ(x.read(), std::vector<float>(100, 2));
  });
  EXPECT_EQ(nccl_.leaks(), 0u);
}

}  // namespace
}  // namespace lightcc
