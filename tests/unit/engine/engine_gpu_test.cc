// Tensors of GPUs: every kind of collective gives what it gives on the CPU, in order with the program's streams, which
// nobody waits for; through the host and by NCCL. The GPUs are doubles in host memory; each rank has one of them.
#include "engine/negotiate/control/fusion.h"
#include "labels.h"
#include "unit/gpus.h"

LABEL(on_hosts, "*Gpus.OtherKindsRunOnTensorsOfGpus*:*Gpus.RanksThatHaveJoined*");
LABEL(as_placed, "*Gpu*-*Gpus.OtherKindsRunOnTensorsOfGpus*:*Gpus.RanksThatHaveJoined*");

namespace lightcc {
namespace {

using namespace test;

constexpr int64_t kSlice = int64_t(kStagedSliceBytes / sizeof(float));

class Gpus : public GpuTest, public testing::WithParamInterface<int> {
 protected:
  Gpus() {
    config_.nccl = GetParam() > 0;
    config_.nccl_streams = std::max(GetParam(), 1);
    nccl_.set_kernels(config_.nccl_streams);
  }
  void exchange_beside_kernels(bool unordered, bool is_heard);
};
INSTANTIATE_TEST_SUITE_P(By, Gpus, testing::Values(0, 1, 3), [](const auto& info) {
  return info.param == 0 ? "Host" : info.param == 1 ? "Nccl" : "NcclOnStreams";
});

TEST_P(Gpus, AllreduceInPlaceAndNot) {
  for (const std::vector<int>& hosts : {std::vector<int>{1}, {2}, {3}, {1, 1}, {2, 1}}) {
    Ranks ranks(hosts, config_);
    const int n = ranks.size();
    ranks.each([&](Engine& engine, int rank) {
      void* stream = stream_of(rank);
      for (const size_t count : {size_t(1), size_t(1000), size_t((kWatched ? 1 : 3) * kSlice + 5)}) {
        GpuTensor in(*this, rank, count, stream), out(*this, rank, count, stream);
        in.fill(float(rank + 1));
        done(engine, on_gpu(engine, Kind::allreduce, "x", {&in}, {&out}));
        EXPECT_EQ(out.read(), std::vector<float>(count, float(n * (n + 1) / 2)));
        EXPECT_EQ(in.read(), std::vector<float>(count, float(rank + 1))) << "the input was written";
        done(engine, on_gpu(engine, Kind::allreduce, "x", {&in}, {&in}));
        EXPECT_EQ(in.read(), out.read());
      }
    });
  }
}

TEST_P(Gpus, ManyAtATimeAreFused) {
  Ranks ranks(std::vector<int>{2, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    for (int again = 0; again < 4; ++again) {
      std::vector<std::unique_ptr<GpuTensor>> tensors;
      std::vector<RequestPtr> requests;
      for (size_t i = 0; i < 12; ++i) {
        tensors.push_back(std::make_unique<GpuTensor>(*this, rank, i * 40'000 + i % 3, stream));
        tensors[i]->fill(float(i) + float(rank));
        requests.push_back(on_gpu(engine, Kind::allreduce, std::to_string(i), {tensors[i].get()}, {tensors[i].get()}));
        engine.submit(requests[i], false);
      }
      for (const RequestPtr& one : requests) EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
      for (size_t i = 0; i < 12; ++i)
        EXPECT_EQ(tensors[i]->read(), std::vector<float>(tensors[i]->count, float(3 * i + 3)));
    }
  });
  EXPECT_GT(ranks.count(Counters::fused_batches), 0u);
}

// The engine's thread starts them, and each stream is marked once.
TEST_P(Gpus, ManyStartedByOneCallCostTheCallerLittle) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void *stream = stream_of(rank), *other = stream_of(rank);
    std::vector<std::unique_ptr<GpuTensor>> tensors;
    std::vector<RequestPtr> requests;
    for (void* of : {stream, stream, other, stream}) {
      GpuTensor& x = *tensors.emplace_back(std::make_unique<GpuTensor>(*this, rank, 100, of));
      x.fill(1);
      requests.push_back(on_gpu(engine, Kind::allreduce, std::to_string(requests.size()), {&x}, {&x}));
    }
    size_t begun = 0;
    engine.submit_all(requests, &begun);
    EXPECT_EQ(begun, requests.size());
    EXPECT_EQ(requests[0]->ready, requests[1]->ready);
    EXPECT_NE(requests[1]->ready, requests[2]->ready);
    for (const RequestPtr& one : requests)
      while (!one->finished) std::this_thread::yield();
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_EQ(finish(engine, requests[i]), Code::ok) << requests[i]->text;
      EXPECT_EQ(tensors[i]->read(), std::vector<float>(100, 2.0f));
    }
  });
  EXPECT_EQ(ranks.count(Counters::caller_steps), 0u);
  EXPECT_GT(ranks.count(Counters::background_steps), 0u);
}

// Behind what the stream has made, and before what it is given next; of the CPU at once.
TEST_P(Gpus, TensorsAreFilledInOrderWithTheirStreams) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void *stream = stream_of(rank), *other = stream_of(rank);
    std::vector<std::unique_ptr<GpuTensor>> sources, tensors;
    std::vector<RequestPtr> requests;
    std::vector<Fill> fills;
    for (void* of : {stream, stream, other, stream}) {
      GpuTensor& from = *sources.emplace_back(std::make_unique<GpuTensor>(*this, rank, 5000 + sources.size(), of));
      GpuTensor& to = *tensors.emplace_back(std::make_unique<GpuTensor>(*this, rank, from.count, of));
      requests.push_back(on_gpu(engine, Kind::allreduce, std::to_string(requests.size()), {&to}, {&to}));
      fills.push_back({requests.back(), from.data});
      from.fill(float(sources.size()));
    }
    std::vector<float> host(3), host_source(3, 5);
    requests.push_back(request(engine, Kind::allreduce, "of the CPU", {in_place(host)}));
    fills.insert(fills.begin() + 1, {requests.back(), host_source.data()});
    engine.fill(fills);
    EXPECT_EQ(host, host_source);
    for (const auto& one : sources) one->fill(-1);  // the program goes on with them
    size_t begun = 0;
    engine.submit_all(requests, &begun);
    for (const RequestPtr& one : requests) EXPECT_EQ(finish(engine, one), Code::ok) << one->text;
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_EQ(tensors[i]->read(), std::vector<float>(tensors[i]->count, 2 * float(i + 1)));
    EXPECT_EQ(host, std::vector<float>(3, 10));
  });
}

TEST_P(Gpus, OtherKindsRunOnTensorsOfGpus) {
  Ranks ranks(3, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    for (const int root : {0, 2}) {
      GpuTensor sent(*this, rank, size_t(kSlice + 3), stream);
      sent.fill(float(rank));
      auto one = on_gpu(engine, Kind::broadcast, "b", {&sent}, {&sent});
      one->what.root = root;
      done(engine, one);
      EXPECT_EQ(sent.read(), std::vector<float>(sent.count, float(root)));
    }
    GpuTensor rows(*this, rank, size_t(rank) * 2, stream), equal(*this, rank, 6, stream);
    rows.fill(float(rank));
    equal.fill(float(rank));
    auto one = done(engine, on_gpu(engine, Kind::allgather, "g", {&rows}, {}, {{rank, 2}}));
    EXPECT_EQ(one->results[0].shape, (Shape{3, 2}));
    EXPECT_EQ(taken(*one), (std::vector<float>{1, 1, 2, 2, 2, 2}));
    one = done(engine, on_gpu(engine, Kind::alltoall, "a", {&equal}, {}, {{3, 2}}));
    EXPECT_EQ(taken(*one), (std::vector<float>{0, 0, 1, 1, 2, 2}));
    one = done(engine, on_gpu(engine, Kind::reducescatter, "r", {&equal}, {}, {{3, 2}}));
    EXPECT_EQ(taken(*one), (std::vector<float>{3, 3}));
    one = on_gpu(engine, Kind::allreduce, "adasum", {&equal}, {&equal});
    one->what.op = ReduceOp::adasum;
    done(engine, one);
    EXPECT_FLOAT_EQ(equal.read()[0], 1.5f) << "of 0, 1 and 2 everywhere";
  });
}

// As long as the program does not wait for its stream, what it queues there runs while others exchange.
TEST_P(Gpus, TheHostWaitsForNoStreamBehindTheExchange) {
  Ranks ranks(2, config_);
  std::atomic<int> blocked{0}, done_with{0};
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 100, stream), y(*this, rank, 100, stream);
    x.fill(1);
    auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    engine.submit(one, false);
    // Behind the submission: the exchange does not wait for it, and nor does whoever waits for the exchange.
    cuda_.run(rank, stream, "a long kernel", {}, [&] {
      ++blocked;
      while (done_with < 2) std::this_thread::yield();
    });
    EXPECT_EQ(finish(engine, one), Code::ok);
    ++done_with;
    EXPECT_EQ(x.read(), std::vector<float>(100, 2));
  });
  EXPECT_EQ(blocked, 2);
}

TEST_P(Gpus, AnotherStreamCanGoOnBehindTheOutputs) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void *stream = stream_of(rank), *other = stream_of(rank);
    GpuTensor x(*this, rank, 100'000, stream);
    x.fill(1);
    const auto one = done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
    one->delivered->order(rank, other);
    EXPECT_EQ(cuda_.read(rank, other, x.data, x.count), std::vector<float>(x.count, 2));
  });
}

// By NCCL rank 1's input comes only after kernels that both ranks queue when the operation is done: if those waited for
// its outputs, nothing would end. is_heard: the program hears that it is done before that.
void Gpus::exchange_beside_kernels(bool unordered, bool is_heard) {
  Ranks ranks(2, config_);
  std::atomic<int> ran_beside{0};
  const bool by_nccl = GetParam() > 0;
  ranks.each([&](Engine& engine, int rank) {
    void *stream = stream_of(rank), *other = stream_of(rank);
    GpuTensor x(*this, rank, 100'000, stream);
    x.fill(1);
    void* late = rank == 1 && by_nccl ? stream_of(rank) : nullptr;
    if (late) {
      CudaEvent input(CudaDouble::functions(), rank);
      input.record(stream);
      input.order(rank, late);
      cuda_.run(rank, late, "a kernel that waits", {{x.data, x.count * sizeof(float), true}},
                [&] { while (ran_beside < 2) std::this_thread::yield(); });
    }
    const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    one->unordered = unordered;
    if (late) one->place.stream = late;
    engine.submit(one, false);
    if (is_heard) { EXPECT_EQ(finish(engine, one), Code::ok) << one->text; }
    while (!one->finished) std::this_thread::yield();
    cuda_.run(rank, stream, "a kernel beside it", {}, [&] { ++ran_beside; });
    if (!is_heard) { EXPECT_EQ(finish(engine, one), Code::ok) << one->text; }
    if (unordered) one->delivered->order(rank, other);
    else other = one->place.stream;
    EXPECT_EQ(cuda_.read(rank, other, x.data, x.count), std::vector<float>(x.count, 2));
  });
  EXPECT_EQ(ran_beside, 2);
}

TEST_P(Gpus, AnUnorderedOneHoldsUpNoStreamButThoseThatAreTold) { exchange_beside_kernels(true, true); }
TEST_P(Gpus, AStreamGoesOnUntilTheProgramHearsThatItIsDone) { exchange_beside_kernels(false, false); }

TEST_P(Gpus, CompressedGradientsAddUpToNearlyTheirSum) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 200'000, stream);
    x.fill(1);
    auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    one->what.codec = {CodecKind::int8, DType::int8};
    one->residuals = {std::make_shared<Residual>()};
    done(engine, one);
    EXPECT_NEAR(x.read()[199'999], 2, 0.05);
  });
}

TEST_P(Gpus, RanksThatHaveJoinedNeedNoGpu) {
  Ranks ranks(3, config_);
  ranks.each([&](Engine& engine, int rank) {
    if (rank < 2) {
      void* stream = stream_of(rank);
      for (const size_t count : {size_t(10), size_t(2 * kSlice + 1)}) {
        GpuTensor x(*this, rank, count, stream);
        x.fill(1);
        done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
        EXPECT_EQ(x.read(), std::vector<float>(count, 2));
      }
      // The second tensor lies between the others in the request, and travels in a collective of its own.
      GpuTensor a(*this, rank, 3, stream), b(*this, rank, 2, stream), c(*this, rank, 40, stream);
      for (GpuTensor* each : {&a, &b, &c}) each->fill(1);
      auto mixed = on_gpu(engine, Kind::allreduce, "mixed", {&a, &b, &c}, {&a, &b, &c});
      mixed->what.tensors[1] = {DType::int32, {2}};
      done(engine, mixed);
      EXPECT_EQ(a.read(), std::vector<float>(3, 2));
      EXPECT_EQ(c.read(), std::vector<float>(40, 2));
    }
    auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
    engine.submit(join, true);
    EXPECT_EQ(finish(engine, join), Code::ok);
  });
}

TEST_P(Gpus, OneRankOnTheCpuIsAMismatch) {
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 4, stream);
    std::vector<float> y(4, 1);
    x.fill(1);
    const auto one = rank == 0 ? request(engine, Kind::allreduce, "x", {in_place(y)})
                               : on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    EXPECT_EQ(negotiated(engine, one), Code::mismatch);
    EXPECT_EQ(one->text, "allreduce of tensor 'x': ranks disagree on device: rank 0 has cpu, rank 1 has cuda");
    done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
    EXPECT_EQ(x.read(), std::vector<float>(4, 2));
  });
}

TEST_P(Gpus, WhatCannotTakePartIsRefused) {
  Ranks ranks(1, config_);
  GpuTensor x(*this, 0, 4, nullptr);
  const auto refused = [&](int device, void* stream) -> std::string {
    auto one = on_gpu(ranks[0], Kind::allreduce, "x", {&x}, {&x});
    one->place.device = device;
    one->place.stream = stream;
    try {
      ranks[0].submit(one, false);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::invalid_argument);
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refused(99, nullptr), "allreduce of tensor 'x' on rank 0: there is no GPU 99, but 8 in all");
  EXPECT_EQ(refused(0, reinterpret_cast<void*>(2)),
            "allreduce of tensor 'x' on rank 0: a stream that cannot take part");
  const auto x_in_place = on_gpu(ranks[0], Kind::allreduce, "x", {&x}, {&x});
  x_in_place->place.device = 99;
  EXPECT_THROW(ranks[0].fill(std::vector<Fill>{{x_in_place, x.data}}), Error);
  done(ranks[0], on_gpu(ranks[0], Kind::allreduce, "x", {&x}, {&x}));
}

TEST_P(Gpus, AGpuThatHasFailedEndsTheEpoch) {
  for (const char* failing : {"record", "copy_all"}) {
    Ranks ranks(2, config_);
    cuda_.fail(failing, 1, true);
    ranks.each([&](Engine& engine, int rank) {
      if (rank == 1) {
        GpuTensor x(*this, rank, 4, nullptr), from(*this, rank, 4, nullptr);
        const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
        const auto fill_and_submit = [&] {
          engine.fill(std::vector<Fill>{{one, from.data}});
          engine.submit(one, false);
        };
        EXPECT_THROW(fill_and_submit(), Error);
        return;
      }
      std::vector<float> y(4, 1);
      EXPECT_EQ(outcome(engine, request(engine, Kind::allreduce, "y", {in_place(y)})), Code::internal);
    });
  }
}

// A copy that fails ends the epoch on all ranks, with a cause.
TEST_F(GpuTest, AFailureOfACopyIsSaid) {
  config_.nccl = false;
  Ranks ranks(2, config_);
  cuda_.fail("copy", 3, true);
  std::atomic<int> named{0};
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    for (int i = 0; i < 10; ++i) {
      GpuTensor x(*this, rank, 10, stream);
      x.fill(1);
      const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      if (outcome(engine, one) == Code::ok) continue;
      if (one->text.find("copying allreduce of tensor 'x' on GPU") != std::string::npos) ++named;
      return;
    }
    ADD_FAILURE() << "rank " << rank << " saw no failure";
  });
  EXPECT_EQ(named, 2);
}

// While a rank does not come, the others' copies are on their way; then it dies, or the epoch is ended.
TEST_P(Gpus, WhatIsUnderWayWhenTheEpochEndsIsLeftInOrder) {
  for (int again = 0; again < 3; ++again) {
    Ranks ranks(2, config_);
    ranks.each([&](Engine& engine, int rank) {
      void* stream = stream_of(rank);
      GpuTensor x(*this, rank, size_t(3 * kSlice), stream);
      x.fill(1);
      const auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      try {
        engine.submit(one, false);
      } catch (const Error&) {  // the epoch is over already
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2 * again));
      if (rank == 1) engine.abort("it was interrupted");
      EXPECT_NE(finish(engine, one), Code::pending);
      x.fill(0);  // the program goes on
    });
  }
}

// ---- that the double finds faults

TEST_P(Gpus, WithoutOrderThereAreFaults) {
  expects_faults_ = true;
  cuda_.ignore_order(true);
  Ranks ranks(2, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 1000, stream);
    x.fill(1);
    done(engine, on_gpu(engine, Kind::allreduce, "x", {&x}, {&x}));
    x.read();
  });
  EXPECT_FALSE(cuda_.faults().empty());
}

}  // namespace
}  // namespace lightcc
