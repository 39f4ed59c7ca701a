// Compressed all-reduces by NCCL (engine/run/nccl_codec_run.h): bit by bit what those of the host come to, outputs and
// what is left behind, whatever happens in between. GPUs and NCCL are doubles; the GPUs run the kernels' own code.
#include <atomic>
#include <cmath>

#include "base/log.h"
#include "labels.h"
#include "unit/nccl_codecs.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

const std::vector<std::vector<size_t>> kSeveral{{1, 1000, 0}, {20'001}, {33}, {4096}};  // by request and tensor

TEST_F(NcclCodec, GivesTheBitsOfTheHost) {
  struct Case {
    const char* name;
    Codec codec;
    DType dtype = DType::float32;
    double pre = 1, post = 1;
    bool in_place = true;
  };
  const Case cases[] = {{"topk", kTopK, DType::float32, 0.5, 1, false},
                        {"int8", kInt8, DType::float32, 0.25, 0.5},
                        {"momentum", {CodecKind::topk, DType::float16, 0.05, 0.5}, DType::bfloat16, 2},
                        {"half", kTopK, DType::float16, 1, 0.5},
                        {"int8half", kInt8, DType::float16, 1, 1.0 / 3, false}};
  for (const std::vector<int>& hosts : {std::vector<int>{2, 2}, {2, 2, 2}, {3, 3}}) {
    if (hosts[0] > 2) values_ = quarters;
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      const DevicePlace place = gpu(rank);
      Left left;
      for (const Case& one : cases) {
        const Form form{one.codec, one.dtype, kSeveral, one.pre, one.post, one.in_place};
        for (int step = 0; step < (kWatched ? 2 : 3); ++step) {
          compare_step(engine, left, form, place, step, one.name);
          if (step != 1) compare_left(left, one.name);
        }
      }
      expect_route(left, CodecRoute::nccl);
      expect_route(left, CodecRoute::host, "cpu");
    });
    EXPECT_EQ(nccl_.leaks(), size_t(3 * ranks.size())) << "of all, of a node, and between nodes";
  }
}

TEST_F(NcclCodec, PartsOverlap) {
  for (const Codec& codec : {kTopK, kInt8}) {
    Ranks ranks(std::vector<int>{2, 2}, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      for (int step = 0; step < (kWatched ? 1 : 2); ++step)
        compare_step(engine, left, {codec, DType::float32, parts(), 1, 0.25, step % 2 == 0}, gpu(rank), step);
      compare_left(left);
    });
  }
}

TEST_F(NcclCodec, WhatIsNotFiniteIsAsOnTheHost) {
  values_ = [](int step, int rank, size_t tensor, size_t count) {
    Floats values = gradient(step, rank, tensor, count);
    if (step == 1 && rank == 1) values[count - 1] = INFINITY;
    if (step == 2) std::ranges::fill(values, -0.0f);
    if (step == 3) std::ranges::fill(values, 1e-42f);
    return values;
  };
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 5; ++step)
      for (const Codec& codec : {kTopK, kInt8}) {
        compare_step(engine, left, {codec, DType::float32, {{900, 5}}}, gpu(rank), step, codec == kInt8 ? "i" : "t");
        compare_left(left);
      }
  });
}

TEST_F(NcclCodec, NothingOfATensorCrossesTheBus) {
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{{CodecKind::topk, DType::float32, 0.001}, DType::float32, {{3'000'000}}};
    for (int step = 0; step < 3; ++step) step_of(engine, left, form, gpu(rank), step, "x");
  });
  EXPECT_EQ(cuda_.calls("encode"), 4u * 3) << "3 M elements are one part";
  EXPECT_LT(cuda_.pinned_bytes(), 4 * (9u << 20)) << "two slots a rank for the first values, and one for a word";
  EXPECT_EQ(cuda_.calls("call"), 0u) << "nobody is rung";
}

// The communicators are there for 2D already; or the first compressed all-reduce makes those that are missing.
TEST_F(NcclCodec, CommunicatorsAreThoseOf2d) {
  for (const bool is_2d : {true, false}) {
    config_.nccl_2d = is_2d;
    config_.nccl_streams = 2;
    nccl_.set_kernels(3);
    Ranks ranks(std::vector<int>{2, 2}, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      GpuTensor dense(*this, rank, 1 << 18, stream_of(rank));
      for (int step = 0; step < 3; ++step) {
        dense.fill(1);
        done(engine, on_gpu(engine, Kind::allreduce, "dense", {&dense}, {&dense}));
        EXPECT_EQ(dense.read(), Floats(dense.count, 4));
        compare_step(engine, left, {kTopK, DType::float32, kSeveral}, gpu(rank), step);
      }
      expect_route(left, CodecRoute::nccl);
    });
    EXPECT_EQ(nccl_.leaks(), is_2d ? 12u : 16u);
  }
}

// The communicators are bound to the GPU of the first tensors.
TEST_F(NcclCodec, TensorsOfOtherGpusAreCompressedThere) {
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 4; ++step)
      compare_step(engine, left, {kTopK, DType::float32, {{4096}, {100, 3000}}}, gpu(rank + 4 * (step % 2)), step);
    compare_left(left);
    expect_route(left, CodecRoute::nccl);
  });
}

TEST_F(NcclCodec, ProcessSetsThatCrossEachOther) {
  values_ = quarters;
  Ranks ranks(std::vector<int>{3, 3}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const int first = add_group(engine, {0, 1, 4, 3}), second = add_group(engine, {1, 2, 4, 5});
    const DevicePlace place = gpu(rank);
    Left left;
    for (int step = 0; step < 3; ++step) {
      if (rank % 3 < 2)
        compare_step(engine, left, {kTopK, DType::float32, kSeveral, 1, 1, true, first}, place, step, "a");
      if (rank % 3 > 0)
        compare_step(engine, left, {kInt8, DType::float32, kSeveral, 1, 1, true, second}, place, step, "b");
      compare_step(engine, left, {kTopK, DType::float32, {{5000}}}, place, step, "w");
    }
    compare_left(left);
    expect_route(left, CodecRoute::nccl);
  });
}

// While a rank has joined, the others compress on their hosts, with what is left behind on their GPUs.
TEST_F(NcclCodec, WithARankThatHasJoinedItGoesThroughTheHost) {
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{{CodecKind::topk, DType::float32, 0.05, 0.5}, DType::float32, {{3000}, {20}}};
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step < (rank == 3 ? 2 : 5); ++step) {
        compare_step(engine, left, form, gpu(rank), step);
        if (step < 2) expect_route(left, CodecRoute::nccl);
      }
      auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
      engine.submit(join, true);
      EXPECT_EQ(finish(engine, join), Code::ok);
      compare_left(left);
    }
  });
}

// From one GPU to another, to the CPU and back; and from one epoch to the next, of other hosts, by other routes.
TEST_F(NcclCodec, WhatIsLeftBehindGoesWithItsTensor) {
  std::vector<Left> lefts(6);
  int step = 0;
  for (const std::vector<int>& hosts : {std::vector<int>{2, 2}, {1, 1}, {2, 2, 2}, {2, 1}, {2, 2}}) {
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left& left = lefts[size_t(rank)];
      const DevicePlace places[] = {gpu(rank), gpu((rank + 2) % 8), {}, gpu(rank)};
      int now = step;
      for (const DevicePlace& place : places)
        for (int again = 0; again < 2; ++again)
          compare_step(engine, left, {kTopK, DType::float32, {{3000, 70}, {5000}}}, place, now++);
      compare_left(left);
    });
    step += 8;
  }
}

TEST_F(NcclCodec, WhatWasSavedIsTakenIn) { expect_what_was_saved_is_taken_in({2, 2, 2}, {2, 2}, CodecRoute::nccl); }

TEST_F(NcclCodec, IsReadWhileItIsExchanged) {
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{kTopK, DType::float32, {{40'000}, {40'000}, {7}}};
    compare_step(engine, left, form, gpu(rank), 0);
    std::atomic<bool> is_over{false};
    std::thread reader([&, copy = left] {
      while (!is_over) left_behind(copy, "gpu");
    });
    for (int step = 1; step < 5; ++step) compare_step(engine, left, form, gpu(rank), step);
    is_over = true;
    reader.join();
    compare_left(left);
  });
}

// One rank's knob or kernels, hosts of several sizes, codecs and dtypes without kernels: all take the other way alike.
TEST_F(NcclCodec, WhatNotAllCanGoesThroughTheHost) {
  set_log(int(Level::info), true, 0, "h");
  const auto log_of = [&](const std::vector<int>& hosts, const std::vector<Config>& configs, const Codec& codec) {
    testing::internal::CaptureStderr();
    Ranks ranks(hosts, configs);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      for (int step = 0; step < 2; ++step)
        compare_step(engine, left, {codec, DType::float32, {{3000}}}, gpu(rank), step);
      compare_left(left);
      expect_route(left, CodecRoute::host);
    });
    return testing::internal::GetCapturedStderr();
  };
  std::vector<Config> configs(4, config_);
  configs[2].gpu_compression = false;
  std::string log = log_of({2, 2}, configs, kTopK);
  EXPECT_NE(log.find("not all GPUs of the group compress: rank 2: LIGHTCC_GPU_COMPRESSION is 0"), std::string::npos)
      << log;
  cuda_.fail("load_codecs", 1, true);
  log = log_of({2, 2}, {4, config_}, kTopK);
  EXPECT_NE(log.find("not all GPUs of the group compress: rank 0: planted"), std::string::npos) << log;
  cuda_.fail("load_codecs", 1);
  CudaDouble::functions().load_codecs(0);  // none fails behind this one
  log = log_of({2, 1}, {3, config_}, kTopK);
  const std::string why = "GPUs do where each host has one rank, and by NCCL where all hosts have equally many";
  EXPECT_NE(log.find(why), std::string::npos) << log;
  log = log_of({2, 2}, {4, config_}, {CodecKind::int4, DType::int8});
  EXPECT_EQ(log.find("compressed all-reduces"), std::string::npos) << log;
  set_log(int(Level::warning), false, 0, "h");
  EXPECT_EQ(cuda_.calls("encode"), 0u);
}

TEST_F(NcclCodec, ManyMayBeQueued) {
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 4096, stream);
    auto residual = std::make_shared<Residual>();
    x.fill(0);
    // It keeps the stream busy, so that batches queue up behind it; how long it takes decides nothing.
    cuda_.run(rank, stream, "a long kernel", {}, [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
    for (int i = 0; i < 50; ++i) {
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->what.codec = kInt8;
      one->residuals = {residual};
      done(engine, one);
    }
    EXPECT_EQ(x.read(), Floats(4096));
  });
}

}  // namespace
}  // namespace lightcc
