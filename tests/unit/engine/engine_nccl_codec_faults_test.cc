// What goes wrong in compressed all-reduces by NCCL (engine/run/nccl_codec_run.h): no memory, messages that are none,
// calls that fail, a rank that dies, tensors that are freed or mixed; and what the doubles find where order is missing.
#include <atomic>

#include "labels.h"
#include "unit/nccl_codecs.h"

LABEL(as_placed);

namespace lightcc {
namespace {

using namespace test;

class NcclCodecFaults : public NcclCodec {
 protected:
  RequestPtr compressed(Engine& engine, GpuTensor& x, const Codec& codec = kTopK,
                        std::shared_ptr<Residual> residual = std::make_shared<Residual>()) {
    auto one = on_gpu(engine, Kind::allreduce, "x", {&x}, {&x});
    one->what.codec = codec;
    one->residuals = {std::move(residual)};
    return one;
  }
  // What all-reduces come to once one has failed; "": none has.
  std::string failure(Engine& engine, int rank, size_t count = 3000) {
    GpuTensor x(*this, rank, count, stream_of(rank));
    x.fill(1);
    for (const uint64_t deadline = now_ns() + kPatienceNs; now_ns() < deadline;)
      if (const auto one = compressed(engine, x); outcome(engine, one) != Code::ok) return one->text;
    return "";
  }
};

TEST_F(NcclCodecFaults, NoMemoryIsAnErrorOfThatAllreduceOnAllRanks) {
  for (const int call : {1, 4, 5, 8}) {  // of any rank: of a residual or of messages
    Ranks ranks(std::vector<int>{2, 2}, config_);
    std::string errors[4];
    cuda_.fail("allocate", call);
    ranks.each([&](Engine& engine, int rank) {
      Left left;
      step_of(engine, left, {kTopK, DType::float32, {{500'000}}}, gpu(rank), 0, "gpu", Code::internal);
      errors[rank] = texts_[size_t(rank)];
      EXPECT_NE(errors[rank].find("has no memory on its GPU to compress allreduce of tensor 'gpu0', of which 2000064 "
                                  "bytes"),
                std::string::npos)
          << errors[rank];
      GpuTensor dense(*this, rank, 1000, stream_of(rank));
      dense.fill(1);
      done(engine, on_gpu(engine, Kind::allreduce, "dense", {&dense}, {&dense}));
      EXPECT_EQ(dense.read(), Floats(1000, 4));
      for (int step = 1; step < 3; ++step)
        compare_step(engine, left, {kTopK, DType::float32, {{500'000}}}, gpu(rank), step);
      compare_left(left);
      expect_route(left, CodecRoute::nccl);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, errors[0]);
  }
}

TEST_F(NcclCodecFaults, ForgedMessagesEndTheEpoch) {
  for (const int device : {1, 2}) {
    Ranks ranks(std::vector<int>{2, 2}, config_);
    cuda_.forge_messages(device);
    ranks.each([&](Engine& engine, int rank) {
      const std::string text = failure(engine, rank), host = device == 1 ? "host 0" : "host 1";
      EXPECT_NE(text.find("allreduce of tensor 'x': " + host + " of the group sent compressed gradients that are none"),
                std::string::npos)
          << text;
    });
  }
}

TEST_F(NcclCodecFaults, FailuresOfCallsEndTheEpochOnAll) {
  for (const auto& [function, calls] : {std::pair("ReduceScatter", 3), {"AllGather", 2}, {"AllGather", 7},
                                        {"CommInitRankConfig", 6}, {"GetUniqueId", 2}}) {
    Ranks ranks(std::vector<int>{2, 2}, config_);
    nccl_.fail(function, calls, 3);
    ranks.each([&, function = function](Engine& engine, int rank) {
      const std::string text = failure(engine, rank);
      EXPECT_NE(text.find("NCCL"), std::string::npos) << function << ": " << text;
    });
  }
  for (const auto& [function, calls] : {std::pair("encode", 3), {"decode", 3}, {"copy", 9}}) {
    Ranks ranks(std::vector<int>{2, 2}, config_);
    cuda_.fail(function, calls);
    ranks.each([&, function = function](Engine& engine, int rank) {
      const std::string text = failure(engine, rank);
      EXPECT_NE(text.find("planted"), std::string::npos) << function << ": " << text;
    });
  }
}

// The GPU of rank 3 has not come to its gradient: rank 2 waits for that, and ranks 0 and 1 have encoded and wait for
// the messages of these. What is left behind serves the next epoch.
TEST_F(NcclCodecFaults, ARankIsKilledBetweenEncodingAndExchange) {
  std::vector<Left> lefts(4);
  std::atomic<bool> go_on{false};
  std::atomic<int> queued{0};
  {
    Ranks ranks(std::vector<int>{2, 2}, config_);
    ranks.each([&](Engine& engine, int rank) {
      Left& left = lefts[size_t(rank)];
      step_of(engine, left, {kInt8}, gpu(rank), 0, "gpu");
      GpuTensor x(*this, rank, 1000, stream_of(rank));
      x.fill(1);
      if (rank == 3)
        cuda_.run(rank, x.stream, "a kernel that never ends", {}, [&] {
          while (!go_on) std::this_thread::yield();
        });
      EXPECT_EQ(outcome(engine, compressed(engine, x, kInt8, left["gpu0"][0])), Code::ok) << "it is queued";
      ++queued;
      while (queued < 4) std::this_thread::yield();
      if (rank == 3) return engine.abort("it is gone");
      cuda_.synchronize(rank, x.stream);
      const auto next = compressed(engine, x, kInt8, left["gpu0"][0]);
      EXPECT_NE(outcome(engine, next), Code::ok);
      EXPECT_NE(next->text.find("it is gone"), std::string::npos) << next->text;
      if (rank == 0) go_on = true;
    });
  }
  Ranks ranks(std::vector<int>{2, 2}, config_);
  ranks.each([&](Engine& engine, int rank) {
    Left& left = lefts[size_t(rank)];
    for (int step = 1; step < 3; ++step) step_of(engine, left, {kInt8}, gpu(rank), step, "gpu");
    EXPECT_EQ(left_behind(left, "gpu").size(), rank % 2 ? 488u : 512u) << "of 1000, cut on lines";
  });
}

TEST_F(NcclCodecFaults, ATensorIsFreedInTheOrderOfItsStream) {
  expect_tensors_are_freed_in_the_order_of_their_stream({2, 2});
}

TEST_F(NcclCodecFaults, TensorsOfTheHostAndOfGpusDoNotMix) {
  expect_tensors_of_the_host_and_of_gpus_do_not_mix({2, 2});
}

// Without order the double finds that an encoding runs beside what makes its gradient, that messages are exchanged
// beside it, and that they are decoded beside their exchange. int8, of which no message is refused.
TEST_F(NcclCodecFaults, WithoutOrderTheDoubleFindsFaults) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the kernels' accesses are not atomic: without order they race";
#endif
  expects_faults_ = true;
  Ranks ranks(std::vector<int>{2, 2}, config_);
  cuda_.ignore_order(true);
  ranks.each([&](Engine& engine, int rank) {
    Left left;
    for (int step = 0; step < 2; ++step) step_of(engine, left, {kInt8}, gpu(rank), step, "x");
  });
  cuda_.ignore_order(false);
  std::string all;
  for (const std::string& fault : cuda_.faults()) all += fault + "\n";
  for (const char* found : {"an encoding", "a decoding", "a kernel of NCCL"})
    EXPECT_NE(all.find(found), std::string::npos) << found << ": " << all;
}

}  // namespace
}  // namespace lightcc
