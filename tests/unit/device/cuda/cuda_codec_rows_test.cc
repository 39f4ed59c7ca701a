// The rows of the table that encode and decode (device/cuda.h): on a driver that only notes what it is asked for, and
// on the double of CUDA, where the kernels' code runs in the order of streams.
#include <gtest/gtest.h>

#include "device/cuda/codecs.h"
#include "device/cuda/codec_steps.h"
#include "unit/codec_cases.h"
#include "unit/doubles/cuda_double.h"
#include "unit/doubles/driver_double.h"

namespace lightcc::codec_rows_test {
namespace {

using test::CudaDouble;
using test::DriverDouble;

const CudaFunctions& table() { return driver_functions(); }
void* const kStream = reinterpret_cast<void*>(uintptr_t(0x77));
std::string words(const char* failure) { return failure ? failure : ""; }

CudaEncode piece(size_t count, size_t k) {
  CudaEncode piece{};
  piece.count = count;
  piece.k = k;
  piece.scale = 1;
  piece.dtype = int(DType::float32);
  return piece;
}

TEST(CudaCodecRows, ABatchOfAnyNumberOfPiecesIsTheSameLaunches) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  EXPECT_EQ(words(table().load_codecs(device)), "");
  const size_t pins = driver.calls("MemHostRegister");
  EXPECT_EQ(driver.calls("CompileProgram"), 3u) << "those that scale and copy are compiled for whoever needs them";
  for (size_t count : {1, 200, 300}) {
    driver.launches.clear();
    const std::vector<CudaEncode> pieces(count, piece(100'000, 1000));
    EXPECT_EQ(words(table().encode(device, kStream, int(CodecKind::topk), pieces.data(), count)), "");
    std::vector<std::string> names;
    for (const auto& launch : driver.launches) names.push_back(launch.kernel);
    const std::vector<std::string> want(gpu::kCodecKernelNames, gpu::kCodecKernelNames + 10);
    EXPECT_EQ(names, want) << "of " << count << " pieces";
    EXPECT_EQ(driver.launches[0].stream, kStream);
  }
  EXPECT_EQ(driver.calls("MemcpyAsync"), 3u) << "a table of the pieces for each batch";
  EXPECT_EQ(driver.calls("MemHostRegister"), pins) << "the tables wait where memory is pinned already";
  EXPECT_EQ(driver.calls("MemAllocFromPoolAsync"), driver.calls("MemFreeAsync"));
}

TEST(CudaCodecRows, WhatCannotBeEncodedIsRefusedInWords) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  const CudaEncode none = piece(0, 0), too_many = piece(5, 6);
  CudaEncode integers = piece(5, 1);
  integers.dtype = int(DType::int32);
  const int topk = int(CodecKind::topk);
  EXPECT_EQ(words(table().encode(device, kStream, topk, &none, 1)), "");
  EXPECT_EQ(words(table().encode(device, kStream, topk, nullptr, 0)), "");
  EXPECT_EQ(driver.launches.size(), 0u);
  EXPECT_EQ(words(table().encode(device, kStream, topk, &too_many, 1)), "top-k on a GPU cannot select 6 of 5 elements");
  EXPECT_EQ(words(table().encode(device, kStream, topk, &integers, 1)),
            "a codec on a GPU was given elements of DType 4");
  EXPECT_EQ(words(table().encode(device, kStream, 0, &too_many, 1)), "there is no codec 0 on a GPU");
  const CudaEncode good = piece(5, 1);
  driver.fail("MemAllocFromPoolAsync", 2);
  EXPECT_EQ(words(table().encode(device, kStream, topk, &good, 1)),
            "cuMemAllocFromPoolAsync of a codec: it failed (CUDA_ERROR_2)");
  driver.forget_failures();
  driver.fail("LaunchKernel", 700);
  EXPECT_EQ(words(table().encode(device, kStream, topk, &good, 1)), "lightcc_topk_prepare: it failed (CUDA_ERROR_700)");
  EXPECT_EQ(driver.calls("MemAllocFromPoolAsync"), driver.calls("MemFreeAsync") + 1) << "none was given once";
}

TEST(CudaCodecRows, ATableIsNotOverwrittenBeforeItIsCopied) {
  DriverDouble driver;
  const int device = DriverDouble::new_device();
  EXPECT_EQ(words(table().load_codecs(device)), "");
  const CudaEncode one = piece(5, 1);
  EXPECT_EQ(words(table().encode(device, kStream, int(CodecKind::topk), &one, 1)), "");
  driver.fail("EventQuery", kCudaNotReady);
  EXPECT_EQ(words(table().encode(device, kStream, int(CodecKind::topk), &one, 1)), "");
  EXPECT_EQ(driver.calls("MemHostRegister"), 2u);
}

// ---- on the double

CudaDouble* cuda = nullptr;

struct DoubleMemory {
  static void* allocate(size_t bytes) { return cuda->allocate(0, bytes); }
  static void release(void* memory) { cuda->release(memory); }
  static void write(void* to, const void* from, size_t bytes) {
    cuda->host_writes(to, bytes);
    test::move_bytes(to, from, bytes);
  }
  static void read(void* to, const void* from, size_t bytes) {
    cuda->host_reads(from, bytes);
    test::move_bytes(to, from, bytes);
  }
};
using Encode = test::EncodeTrial<DoubleMemory>;

class CudaCodecDouble : public testing::TestWithParam<CodecKind> {
 protected:
  CudaCodecDouble() { cuda = &double_; }
  CudaDouble double_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, CudaCodecDouble, testing::Values(CodecKind::topk, CodecKind::int8),
                         [](auto& info) { return info.param == CodecKind::topk ? "TopK" : "Int8"; });

TEST_P(CudaCodecDouble, EncodesInTheOrderOfTheStream) {
  const CudaFunctions& functions = CudaDouble::functions();
  void* stream = nullptr;
  ASSERT_EQ(words(functions.create_stream(0, &stream)), "");
  std::vector<std::unique_ptr<Encode>> trials;
  for (unsigned seed = 1; seed < 10; ++seed) trials.push_back(std::make_unique<Encode>(GetParam(), seed, 10'000));
  for (int step = 0; step < 3; ++step) {
    std::vector<CudaEncode> pieces;
    for (auto& trial : trials) {
      trial->begin_step();
      pieces.push_back(trial->piece());
    }
    ASSERT_EQ(words(functions.encode(0, stream, int(GetParam()), pieces.data(), pieces.size())), "");
    cuda->synchronize(0, stream);
    for (const auto& trial : trials) ASSERT_EQ(trial->difference(), "") << "seed " << cuda->seed();
  }
  EXPECT_EQ(cuda->faults(), std::vector<std::string>{});
  EXPECT_EQ(words(functions.destroy_stream(0, stream)), "");
}

TEST_P(CudaCodecDouble, AnEncodingThatNothingIsOrderedBehindIsFound) {
  const CudaFunctions& functions = CudaDouble::functions();
  void* stream = nullptr;
  ASSERT_EQ(words(functions.create_stream(0, &stream)), "");
  Encode trial(GetParam(), 1, 10'000);
  trial.begin_step();
  const CudaEncode piece = trial.piece();
  ASSERT_EQ(words(functions.encode(0, stream, int(GetParam()), &piece, 1)), "");
  cuda->host_reads(piece.body, 1);  // before the stream is known to have come so far
  EXPECT_NE(cuda->faults(), std::vector<std::string>{});
  cuda->synchronize(0, stream);
  EXPECT_EQ(words(functions.destroy_stream(0, stream)), "");
}

}  // namespace
}  // namespace lightcc::codec_rows_test
