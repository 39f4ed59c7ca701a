// What goes wrong in compressed all-reduces whose messages a GPU makes (engine/run/codec_run.h): no memory, messages
// that are none, a rank that dies, tensors that are freed or mixed; and what the double finds where order is missing.
#include <atomic>

#include "labels.h"
#include "unit/gpu_codecs.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

class GpuCodecFaults : public GpuCodec {};

TEST_F(GpuCodecFaults, NoMemoryIsAnErrorOfThatAllreduceOnAllRanks) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  Left lefts[2];
  std::string errors[2];
  for (const int call : {1, 2, 3, 4}) {  // of either rank: of a residual or of messages
    const std::string name = "x" + std::to_string(call);
    cuda_.fail("allocate", call);
    ranks.each([&](Engine& engine, int rank) {
      step_of(engine, lefts[rank], {kTopK, DType::float32, {{500'000}}}, gpu(rank), 0, name, Code::internal);
      errors[rank] = texts_[size_t(rank)];
      EXPECT_NE(errors[rank].find("has no memory on its GPU to compress allreduce of tensor '" + name +
                                          "0', of which 4000064 bytes"),
                std::string::npos)
          << errors[rank];
      void* stream = stream_of(rank);
      GpuTensor dense(*this, rank, 1000, stream);
      dense.fill(1);
      done(engine, on_gpu(engine, Kind::allreduce, "dense", {&dense}, {&dense}));
      EXPECT_EQ(dense.read(), Floats(1000, 2));
      for (int step = 1; step < 3; ++step) compare_step(engine, lefts[rank], {}, gpu(rank), step, name);
    });
    EXPECT_EQ(errors[0], errors[1]);
  }
}

// Rank 1 compresses on its host, and rank 3 has joined.
TEST_F(GpuCodecFaults, NoMemoryOfOneIsAnErrorWhereTheHostCompresses) {
  std::vector<Config> configs(4, config_);
  configs[1].gpu_compression = false;
  Ranks ranks({1, 1, 1, 1}, configs);
  cuda_.fail("allocate", 1);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    if (rank < 3) {
      step_of(engine, left, {kTopK, DType::float32, {{100, 5000}}}, gpu(rank), 0, "x", Code::internal);
      EXPECT_NE(texts_[size_t(rank)].find("has no memory on its GPU to compress allreduce of tensor 'x0'"),
                std::string::npos)
          << texts_[size_t(rank)];
      for (int step = 1; step < 3; ++step) compare_step(engine, left, {}, gpu(rank), step, "y");
    }
    auto join = std::make_shared<Request>(RequestForm(Kind::join, ""));
    engine.submit(join, true);
    EXPECT_EQ(finish(engine, join), Code::ok);
  });
}

TEST_F(GpuCodecFaults, ForgedMessagesEndTheEpoch) {
  Ranks ranks(std::vector<int>{1, 1}, config_);
  cuda_.forge_messages(1);
  ranks.each([&](Engine& engine, int rank) {
    void* stream = stream_of(rank);
    GpuTensor x(*this, rank, 3000, stream);
    x.fill(1);
    std::string text;
    for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline;) {
      auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
      one->what.codec = kTopK;
      one->residuals = {std::make_shared<Residual>()};
      if (outcome(engine, one) != Code::ok) {
        text = one->text;
        break;
      }
    }
    EXPECT_NE(text.find("allreduce of tensor 'x': host 1 of the group sent compressed gradients that are none"),
              std::string::npos)
        << text;
  });
}

// Rank 0 has encoded when rank 1, whose GPU has not come to it, is killed. Its residuals serve the next epoch, on other
// streams, and that GPU comes to the encoding of the last one only when that of the next is queued behind it.
TEST_F(GpuCodecFaults, ARankIsKilledBetweenEncodingAndExchange) {
  std::vector<Left> lefts(2);
  std::vector<std::unique_ptr<GpuTensor>> tensors(2);
  std::atomic<bool> may_go_on{false};
  const auto await_encodings = [&](uint64_t calls) {
    for (const uint64_t end = now_ns() + kPatienceNs; cuda_.calls("encode") < calls && now_ns() < end;)
      std::this_thread::yield();
  };
  {
    Ranks ranks(std::vector<int>{1, 1}, config_);
    ranks.each([&](Engine& engine, int rank) {
      step_of(engine, lefts[size_t(rank)], {}, gpu(rank), 0, "gpu");
      auto& x = tensors[size_t(rank)] = std::make_unique<GpuTensor>(*this, rank, 1000, stream_of(rank));
      x->fill(1);
      if (rank == 1)
        cuda_.run(rank, x->stream, "a kernel that waits", {}, [&] {
          while (!may_go_on) std::this_thread::yield();
        });
      auto one = on_gpu(engine, Kind::allreduce, "gpu0", {x.get()}, {x.get()});
      one->what.codec = kTopK;
      one->residuals = {lefts[size_t(rank)]["gpu0"][0]};
      std::thread killer([&] {
        if (rank == 0) return;
        await_encodings(4);
        engine.abort("killed");
      });
      EXPECT_NE(outcome(engine, one), Code::ok);
      killer.join();
    });
  }
  Ranks ranks(std::vector<int>{1, 1}, config_);
  std::thread helper([&] {
    await_encodings(6);
    may_go_on = true;
  });
  ranks.each([&](Engine& engine, int rank) {
    for (int step = 1; step < 3; ++step) step_of(engine, lefts[size_t(rank)], {}, gpu(rank), step, "gpu");
    EXPECT_EQ(left_behind(lefts[size_t(rank)], "gpu").size(), 1000u);
  });
  helper.join();
}

TEST_F(GpuCodecFaults, ATensorIsFreedInTheOrderOfItsStream) {
  expect_tensors_are_freed_in_the_order_of_their_stream({1, 1});
}

TEST_F(GpuCodecFaults, TensorsOfTheHostAndOfGpusDoNotMix) {
  expect_tensors_of_the_host_and_of_gpus_do_not_mix({1, 1});
}

// Without order the double finds that an encoding runs beside what makes its gradient, and that a residual is read
// while its word is turned. int8, of which no message is refused.
TEST_F(GpuCodecFaults, WithoutOrderTheDoubleFindsFaults) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the kernels' accesses are not atomic: without order they race";
#endif
  expects_faults_ = true;
  Ranks ranks(std::vector<int>{1, 1}, config_);
  cuda_.ignore_order(true);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 2; ++step) {
      step_of(engine, left, {kInt8}, gpu(rank), step, "x");
      left_behind(left, "x");
    }
  });
  cuda_.ignore_order(false);
  std::string all;
  for (const std::string& fault : cuda_.faults()) all += fault + "\n";
  EXPECT_NE(all.find("an encoding"), std::string::npos) << all;
  EXPECT_NE(all.find("a decoding"), std::string::npos) << all;
}

}  // namespace
}  // namespace lightcc
