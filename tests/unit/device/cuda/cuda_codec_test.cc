// The kernels of codecs (device/cuda/topk_encode.h, topk_decode.h, int8_codec.h), run as plain C++, against the CPU's
// codecs: bit for bit. LIGHTCC_TEST_CODEC_PIECES says how many random pieces of each kind there are.
#include <gtest/gtest.h>

#include <cstdlib>

#include "labels.h"
#include "unit/codec_cases.h"
#include "unit/device/cuda/host_grid.h"

LABEL(alone);

namespace lightcc::codec_test {
namespace {

struct HostMemory {
  static void* allocate(size_t bytes) { return ::operator new(bytes, std::align_val_t{256}); }
  static void release(void* memory) { ::operator delete(memory, std::align_val_t{256}); }
  static void write(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
  static void read(void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); }
};
using Encode = test::EncodeTrial<HostMemory>;
using Decode = test::DecodeTrial<HostMemory>;

unsigned pieces() {
  const char* given = std::getenv("LIGHTCC_TEST_CODEC_PIECES");
  return given ? unsigned(std::atoi(given)) : 600;
}
constexpr size_t kMostElements = 150'000;

template <class Trial, class Piece, class Batch>
void run(std::vector<std::unique_ptr<Trial>>& trials, unsigned seed, Batch batch = {}) {
  std::vector<decltype(trials[0]->piece())> given;
  for (const auto& trial : trials) given.push_back(trial->piece());
  auto all = gpu::pieces_of<Piece>(given.data(), given.size());
  test::run_on_host<Batch>(all, seed, batch);
}

template <class Piece, class Batch>
void expect_same_messages(CodecKind kind) {
  std::mt19937 random(1);
  for (unsigned piece = 0; piece < pieces();) {
    std::vector<std::unique_ptr<Encode>> trials;
    for (unsigned n = 1 + random() % 6; n > 0; --n)
      trials.push_back(std::make_unique<Encode>(kind, ++piece, kMostElements));
    for (unsigned step = 1 + random() % 4; step > 0; --step) {
      for (auto& trial : trials) {
        trial->begin_step();
        if (random() % 8 == 0) trial->set_state(uint32_t(random()), std::bit_cast<float>(uint32_t(random())));
      }
      run<Encode, Piece, Batch>(trials, random());
      for (const auto& trial : trials) ASSERT_EQ(trial->difference(), "");
    }
  }
}

TEST(CudaCodec, EncodesTopKAsACpuDoes) {
  expect_same_messages<gpu::EncodePiece, gpu::EncodeBatch>(CodecKind::topk);
}
TEST(CudaCodec, EncodesInt8AsACpuDoes) {
  expect_same_messages<gpu::Int8EncodePiece, gpu::Int8EncodeBatch>(CodecKind::int8);
}

template <class Piece, class Batch>
void expect_same_sums(CodecKind kind) {
  std::mt19937 random(2);
  for (unsigned piece = 0; piece < pieces();) {
    std::vector<std::unique_ptr<Decode>> trials;
    for (unsigned n = 1 + random() % 4; n > 0; --n)
      trials.push_back(std::make_unique<Decode>(kind, ++piece, kMostElements));
    uint64_t error = 0;
    Batch batch{};
    if constexpr (requires { batch.error; }) batch.error = &error;
    run<Decode, Piece, Batch>(trials, random(), batch);
    ASSERT_EQ(error, 0u) << trials[(error & 0xffffffff) - 1]->name();
    for (const auto& trial : trials) ASSERT_EQ(trial->difference(), "");
  }
}

TEST(CudaCodec, DecodesTopKAsACpuDoes) { expect_same_sums<gpu::DecodePiece, gpu::DecodeBatch>(CodecKind::topk); }
TEST(CudaCodec, DecodesInt8AsACpuDoes) {
  expect_same_sums<gpu::Int8DecodePiece, gpu::Int8DecodeBatch>(CodecKind::int8);
}

// What a CPU refuses sets the error word, and nothing else does; nothing around the piece changes.
TEST(CudaCodec, RefusesTheMessagesThatACpuRefuses) {
  unsigned refused = 0;
  for (unsigned seed = 1; seed <= pieces(); ++seed) {
    std::vector<std::unique_ptr<Decode>> trials;
    trials.push_back(std::make_unique<Decode>(CodecKind::topk, seed, 20'000));
    trials[0]->forge();
    uint64_t error = 0;
    gpu::DecodeBatch batch{};
    batch.error = &error;
    run<Decode, gpu::DecodePiece, gpu::DecodeBatch>(trials, seed, batch);
    ASSERT_EQ(error != 0, trials[0]->is_refused_by_cpu()) << trials[0]->name();
    ASSERT_EQ(trials[0]->damage(), "") << trials[0]->name();
    refused += error != 0;
  }
  EXPECT_GT(refused, pieces() / 10);
  EXPECT_LT(refused, pieces());
}

}  // namespace
}  // namespace lightcc::codec_test
