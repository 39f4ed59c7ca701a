// The C API with a tensor of a GPU: its stream goes on behind the outputs from where the caller hears that they are
// done, by whichever call that is, or has given its handle up; not before.
#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "device/cuda_objects.h"
#include "unit/api_requests.h"
#include "unit/doubles/cuda_double.h"

namespace lightcc {
namespace {

using test::CudaDouble;

struct Gpu {
  Gpu() { set_cuda(&CudaDouble::functions()); }
  ~Gpu() { set_cuda(nullptr); }
  CudaDouble cuda;
};

class GpuOrder : public Gpu, public Api {
 public:
  static constexpr int64_t kCount = 1000;

  GpuOrder() {
    check_cuda(CudaDouble::functions().create_stream(0, &stream_), "making a stream", 0);
    x_ = static_cast<float*>(cuda.allocate(0, kCount * sizeof(float)));
    y_ = static_cast<float*>(cuda.allocate(0, kCount * sizeof(float)));
  }
  ~GpuOrder() override {
    cuda.synchronize(0, stream_);
    cuda.release(x_);
    cuda.release(y_);
    CudaDouble::functions().destroy_stream(0, stream_);
  }
  lightcc_request doubled(uint32_t flags = 0) {
    cuda.fill(0, stream_, x_, size_t(kCount), 3);
    tensor_.input = x_, tensor_.output = y_, tensor_.shape = &kCount;
    tensor_.dtype = LIGHTCC_FLOAT32, tensor_.ndim = 1;
    tensor_.place = {0, LIGHTCC_CUDA, stream_};
    lightcc_request request = request_of(LIGHTCC_ALLREDUCE, "x", &tensor_, 1, flags);
    request.prescale = 2;
    return request;
  }
  int64_t submit() {
    const lightcc_request request = doubled();
    const int64_t handle = lightcc_submit(&request);
    EXPECT_GT(handle, 0) << lightcc_error();
    return handle;
  }
  // A kernel of the program's that uses the outputs.
  std::vector<std::string> faults_of_a_use() {
    cuda.run(0, stream_, "the program's kernel", {{y_, kCount * sizeof(float), true}}, [] {});
    cuda.synchronize(0, stream_);
    return cuda.faults();
  }
  void expect_ordered() {
    EXPECT_EQ(faults_of_a_use(), std::vector<std::string>{}) << "seed " << cuda.seed();
    EXPECT_EQ(cuda.read(0, stream_, y_, size_t(kCount)), std::vector<float>(size_t(kCount), 6));
  }
  // Until the engine has finished it, without asking for it.
  static void let_it_finish() {
    const lightcc_request barrier = request_of(LIGHTCC_BARRIER, nullptr, nullptr, 0, LIGHTCC_BLOCK);
    EXPECT_EQ(lightcc_submit(&barrier), 0) << lightcc_error();
  }

  void* stream_ = nullptr;
  float *x_ = nullptr, *y_ = nullptr;
  lightcc_tensor tensor_{};
};

constexpr int kTimeoutMs = 60'000;

TEST_F(GpuOrder, GoesOnBehindTheOutputsFromWait) {
  const int64_t handle = submit();
  EXPECT_EQ(lightcc_wait(handle, kTimeoutMs), LIGHTCC_OK);
  expect_ordered();
  lightcc_release(handle);
}

TEST_F(GpuOrder, GoesOnBehindTheOutputsFromPoll) {
  const int64_t handle = submit();
  while (lightcc_poll(handle) == 0) std::this_thread::yield();
  expect_ordered();
  lightcc_release(handle);
}

TEST_F(GpuOrder, GoesOnBehindTheOutputsFromFinish) {
  EXPECT_EQ(lightcc_finish(submit(), kTimeoutMs), LIGHTCC_OK);
  expect_ordered();
  const int64_t handle = submit();
  EXPECT_EQ(lightcc_finish_all(&handle, 1, kTimeoutMs), LIGHTCC_OK);
  expect_ordered();
}

TEST_F(GpuOrder, GoesOnBehindTheOutputsFromACallThatBlocked) {
  const lightcc_request request = doubled(LIGHTCC_BLOCK);
  const int64_t handle = lightcc_submit(&request);
  ASSERT_GE(handle, 0) << lightcc_error();
  if (handle > 0) {  // it took longer than such a call may
    EXPECT_EQ(lightcc_finish(handle, kTimeoutMs), LIGHTCC_OK);
  }
  expect_ordered();
}

TEST_F(GpuOrder, GoesOnBehindTheOutputsBeforeTheCallback) {
  lightcc_request request = doubled();
  request.context = this;
  request.done = [](void* context, int status, const char* text) {
    EXPECT_EQ(status, LIGHTCC_OK) << text;
    static_cast<GpuOrder*>(context)->expect_ordered();
  };
  ASSERT_EQ(lightcc_submit(&request), 0) << lightcc_error();
  let_it_finish();
}

TEST_F(GpuOrder, GoesOnBehindTheOutputsFromReleaseOrTheLaterEnd) {
  EXPECT_EQ(lightcc_release(submit()), LIGHTCC_OK);
  let_it_finish();
  expect_ordered();
  const int64_t handle = submit();
  let_it_finish();
  EXPECT_EQ(lightcc_release(handle), LIGHTCC_OK);
  expect_ordered();
}

TEST_F(GpuOrder, DoesNotWaitForOutputsThatNobodyHasHeardOf) {
  const int64_t handle = submit();
  let_it_finish();
  EXPECT_EQ(faults_of_a_use().size(), 1u) << "seed " << cuda.seed();
  lightcc_release(handle);
}

}  // namespace
}  // namespace lightcc
