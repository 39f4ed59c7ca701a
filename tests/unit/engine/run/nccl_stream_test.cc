#include "engine/run/nccl_stream.h"

#include <gtest/gtest.h>

#include "unit/doubles/cuda_double.h"

namespace lightcc {
namespace {

using namespace test;

using Texts = std::vector<std::string>;

class NcclStreams : public testing::Test {
 protected:
  // Two tensors of ones into a buffer, which holds NaNs else; what it holds then.
  std::vector<float> copied(bool batches_copies) {
    NcclStream stream(table, 0, batches_copies);
    cuda.fill(0, stream.get(), tensors, 4, 1);
    const CudaCopy copies[] = {{buffer, tensors, 8}, {buffer + 2, tensors + 3, 4}};
    stream.copy_all(copies);
    stream.copy_all({});
    return cuda.read(0, stream.get(), buffer, 3);
  }

  CudaDouble cuda;
  const CudaFunctions& table = CudaDouble::functions();
  float* const tensors = static_cast<float*>(cuda.allocate(0, 16));
  float* const buffer = static_cast<float*>(cuda.allocate(0, 12));
};

TEST_F(NcclStreams, CopyAllThatIsOnTheirGpuInOneLaunch) {
  cuda.fail("copy", 1, true);
  EXPECT_EQ(copied(true), std::vector<float>(3, 1));
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclStreams, CopyOneByOneIfTheyAreToldTo) {
  cuda.fail("copy_all", 1, true);
  EXPECT_EQ(copied(false), std::vector<float>(3, 1));
  EXPECT_THROW(copied(true), Error);
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclStreams, CopiesGoFromOneGpuToAnother) {
  NcclStream stream(table, 0, true);
  auto* const others = static_cast<float*>(cuda.allocate(1, 12));
  cuda.fill(0, stream.get(), buffer, 3, 1);
  stream.copy({others, buffer, 12});
  EXPECT_EQ(cuda.read(0, stream.get(), others, 3), std::vector<float>(3, 1));
  EXPECT_EQ(cuda.faults(), Texts{});
  const CudaCopy copies[] = {{others, buffer, 12}};
  EXPECT_THROW(stream.copy_all(copies), Error) << "only what is on its own";
}

}  // namespace
}  // namespace lightcc
