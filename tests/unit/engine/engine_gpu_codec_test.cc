// Compressed all-reduces whose messages a GPU makes (engine/run/codec_run.h): bit by bit what the CPU's come to,
// outputs and what is left behind, whatever happens in between. The GPUs are doubles, which run the kernels' own code.
#include <atomic>
#include <cmath>

#include "labels.h"
#include "unit/gpu_codecs.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

const std::vector<std::vector<size_t>> kMixed{  // by request and tensor
    {1, 1000, 0}, {70'001}, {33}, {257, 4096}};

TEST_F(GpuCodec, GivesTheBitsOfTheCpu) {
  struct Case {
    const char* name;
    Codec codec;
    DType dtype = DType::float32;
    double pre = 1, post = 1;
    bool in_place = true;
  };
  const Case cases[] = {{"topk", kTopK},
                        {"int8", kInt8, DType::float32, 0.25, 0.5},
                        {"topk16", {CodecKind::topk, DType::float16, 0.1}, DType::float32, 1, 1.0 / 3, false},
                        {"momentum", {CodecKind::topk, DType::float32, 0.05, 0.5}, DType::bfloat16, 2},
                        {"half", kTopK, DType::float16, 1, 0.5},
                        {"int8half", kInt8, DType::float16, 1, 1, false},
                        {"all", {CodecKind::topk, DType::float16, 0.6}}};
  for (const std::vector<int>& hosts : {std::vector<int>{1, 1}, {1, 1, 1}}) {
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      const DevicePlace place = gpu(rank);
      Left left;
      for (const Case& one : cases) {
        const Form form{one.codec, one.dtype, kMixed, one.pre, one.post, one.in_place};
        for (int step = 0; step < (kWatched ? 2 : 4); ++step) {
          compare_step(engine, left, form, place, step, one.name);
          if (step % 3 == 0) compare_left(left, one.name);
        }
        for (const auto& residual : left[std::string("gpu") + one.name + "1"])
          EXPECT_EQ(residual->route(), CodecRoute::gpu);
        for (const auto& residual : left[std::string("cpu") + one.name + "1"])
          EXPECT_EQ(residual->route(), CodecRoute::host);
      }
    });
  }
  EXPECT_GT(cuda_.calls("decode"), 0u);
}

// Sums that are not finite reach all, and are not left behind.
TEST_F(GpuCodec, WhatIsNotFiniteIsAsOnTheCpu) {
  values_ = [](int step, int rank, size_t tensor, size_t count) {
    Floats values = gradient(step, rank, tensor, count);
    if (step == 1 && rank == 1) values[count / 2] = std::nanf("");
    if (step == 2 && rank == 0) values[count - 1] = INFINITY;
    if (step == 3) std::ranges::fill(values, -0.0f);
    if (step == 4) std::ranges::fill(values, 1e-42f);
    return values;
  };
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const DevicePlace place = gpu(rank);
    Left left;
    for (int step = 0; step < 6; ++step)
      for (const Codec& codec : {kTopK, kInt8}) {
        compare_step(engine, left, {codec, DType::float32, {{900, 5}}}, place, step, codec == kInt8 ? "i" : "t");
        compare_left(left);
      }
  });
}

TEST_F(GpuCodec, MessagesAloneCrossTheBus) {
  constexpr size_t kCount = 3'000'000;
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{{CodecKind::topk, DType::float32, 0.001}, DType::float32, {{kCount}}};
    for (int step = 0; step < 2; ++step) step_of(engine, left, form, gpu(rank), step, "x");
  });
  EXPECT_EQ(cuda_.calls("encode"), 2u * 2) << "3 M elements are one part";
  EXPECT_LT(cuda_.pinned_bytes(), 2 * (9u << 20)) << "two slots for the first values of a residual, and messages";
  EXPECT_EQ(cuda_.calls("call"), 2u * 2) << "the engine is rung when the own message is there, and not again";
}

TEST_F(GpuCodec, ProcessSetsThatCrossEachOther) {
  Ranks ranks(std::vector<int>{1, 1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const int first = add_group(engine, {0, 1}), second = add_group(engine, {1, 2});
    const DevicePlace place = gpu(rank);
    Left left;
    for (int step = 0; step < 4; ++step) {
      if (rank < 2) compare_step(engine, left, {kTopK, DType::float32, kMixed, 1, 1, true, first}, place, step, "a");
      if (rank > 0) compare_step(engine, left, {kInt8, DType::float32, kMixed, 1, 1, true, second}, place, step, "b");
      compare_step(engine, left, {kTopK, DType::float32, {{5000}}}, place, step, "w");
    }
    compare_left(left);
  });
}

// A rank that has joined needs no GPU: it takes part from host memory, with what it has left behind on its GPU.
TEST_F(GpuCodec, WhoHasJoinedTakesPartWithWhatItHasLeftBehind) {
  Ranks ranks(std::vector<int>{1, 1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    const DevicePlace place = gpu(rank);
    Left left;
    const Form form{{CodecKind::topk, DType::float32, 0.05, 0.5}, DType::float32, {{3000}, {20}}};
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step < (rank == 2 ? 2 : 5); ++step) compare_step(engine, left, form, place, step);
      auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
      engine.submit(join, true);
      EXPECT_EQ(finish(engine, join), Code::ok);
      compare_left(left);
    }
  });
}

// From one GPU to another, to the CPU and back; and from one epoch to the next, of more or fewer hosts.
TEST_F(GpuCodec, WhatIsLeftBehindGoesWithItsTensor) {
  std::vector<Left> lefts(3);
  int step = 0;
  for (const std::vector<int>& hosts : {std::vector<int>{1, 1, 1}, {1, 1}, {1, 1, 1}}) {
    Ranks ranks(hosts, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left& left = lefts[size_t(rank)];
      const DevicePlace places[] = {gpu(rank), gpu(rank + 3), {}, gpu(rank)};
      int now = step;
      for (const DevicePlace& place : places)
        for (int again = 0; again < 2; ++again)
          compare_step(engine, left, {kTopK, DType::float32, {{3000, 70}, {5000}}}, place, now++, "small");
      const Form large{kTopK, DType::float32, {{1'060'000}}};  // more than a slot has
      if (hosts.size() == 2)
        for (const DevicePlace& place : places) compare_step(engine, left, large, place, now++, "large");
      compare_left(left, "small");
      compare_left(left, "large");
    });
    step += 12;
  }
}

TEST_F(GpuCodec, WhatWasSavedIsTakenIn) { expect_what_was_saved_is_taken_in({1, 1, 1}, {1, 1}, CodecRoute::gpu); }

// A checkpoint is read while gradients are on their way: each reading is whole, and no exchange is disturbed.
TEST_F(GpuCodec, IsReadWhileItIsExchanged) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    const Form form{kTopK, DType::float32, {{40'000}, {40'000}, {7}}};
    compare_step(engine, left, form, gpu(rank), 0);
    std::atomic<bool> is_over{false};
    std::thread reader([&, copy = left] {
      while (!is_over) left_behind(copy, "gpu");
    });
    for (int step = 1; step < 6; ++step) compare_step(engine, left, form, gpu(rank), step);
    is_over = true;
    reader.join();
    compare_left(left);
  });
}

TEST_F(GpuCodec, EachRankChoosesForItself) {
  std::vector<Config> configs(3, config_);
  configs[1].gpu_compression = false;
  cuda_.fail("load_codecs", 1);  // of rank 0 or 2
  Ranks ranks({1, 1, 1}, configs);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 3; ++step) compare_step(engine, left, {kTopK, DType::float32, kMixed}, gpu(rank), step);
    compare_left(left);
  });
  EXPECT_GT(cuda_.calls("encode"), 0u);
}

TEST_F(GpuCodec, WhatHasNoKernelsGoesThroughTheHost) {
  const auto run_it = [&](const std::vector<int>& hosts, const Codec& codec, const Config& config) {
    Ranks ranks(hosts, config);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      compare_step(engine, left, {codec, DType::float32, {{3000}}}, gpu(rank), 0);
    });
  };
  run_it({1, 1}, {CodecKind::int4, DType::int8}, config_);
  run_it({2, 1}, kTopK, config_);
  Config off = config_;
  off.gpu_compression = false;
  run_it({1, 1}, kTopK, off);
  EXPECT_EQ(cuda_.calls("encode"), 0u);
}

}  // namespace
}  // namespace lightcc
