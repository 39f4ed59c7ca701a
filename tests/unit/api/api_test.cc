// The C API with callbacks, in a world of one. What it does with several ranks is tested through Python.
#include "api/lightcc.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "unit/api_requests.h"

namespace lightcc {
namespace {

struct Caller {
  int status = -1, dones = 0;
  std::vector<float> memory;
  std::vector<int32_t> rows;
  void (*then)() = nullptr;  // called by done

  int64_t submit(int kind, const char* name, std::vector<float>& tensor, int flags) {
    const int64_t length = int64_t(tensor.size());
    lightcc_tensor sent = tensor_of(tensor, &length);
    if (kind != LIGHTCC_ALLREDUCE) sent.output = nullptr;
    lightcc_request request = request_of(kind, name, &sent, 1, flags);
    request.prescale = 2;
    request.done = done;
    request.allocate = allocate;
    request.received = received;
    request.context = this;
    return lightcc_submit(&request);
  }
  static void done(void* context, int status, const char*) {
    auto& caller = *static_cast<Caller*>(context);
    caller.status = status, ++caller.dones;
    if (caller.then) caller.then();
  }
  static void* allocate(void* context, int, const int64_t* shape, int) {
    auto& caller = *static_cast<Caller*>(context);
    caller.memory.resize(size_t(shape[0]));
    return caller.memory.data();
  }
  static void received(void* context, int index, const int32_t* rows, int count) {
    auto& caller = *static_cast<Caller*>(context);
    EXPECT_EQ(index, 0);
    EXPECT_EQ(caller.dones, 0) << "it comes before done";
    caller.rows.assign(rows, rows + count);
  }
};

// What was submitted before it is done when it returns.
void barrier() {
  const lightcc_request request = request_of(LIGHTCC_BARRIER, nullptr, nullptr, 0, LIGHTCC_BLOCK);
  EXPECT_EQ(lightcc_submit(&request), 0) << lightcc_error();
}

TEST_F(Api, DoneTakesThePlaceOfAHandle) {
  for (const char* name : {"x", static_cast<const char*>(nullptr)})
    for (int flags : {0, LIGHTCC_BLOCK}) {
      std::vector<float> x{1, 2};
      Caller caller;
      EXPECT_EQ(caller.submit(LIGHTCC_ALLREDUCE, name, x, flags), 0);
      if (!flags) barrier();
      EXPECT_EQ(caller.dones, 1);
      EXPECT_EQ(caller.status, LIGHTCC_OK);
      EXPECT_EQ(x, (std::vector<float>{2, 4}));
    }
}

TEST_F(Api, AnAlltoallTellsWhatItReceived) {
  std::vector<float> x{1, 2, 3};
  Caller caller;
  EXPECT_EQ(caller.submit(LIGHTCC_ALLTOALL, "x", x, LIGHTCC_BLOCK), 0);
  EXPECT_EQ(caller.dones, 1);
  EXPECT_EQ(caller.rows, (std::vector<int32_t>{3}));
  EXPECT_EQ(caller.memory, x);
}

TEST_F(Api, ARefusedSubmissionIsNotDone) {
  std::vector<float> x{1};
  Caller caller;
  EXPECT_EQ(caller.submit(17, "x", x, 0), -LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(caller.dones, 0);
}

// Whatever is refused, the next call works.
TEST_F(Api, RefusesWhatNoTensorIs) {
  std::vector<float> x{1};
  const auto submit = [&](int kind, const std::vector<int64_t>& shape, int ndim, int count = 1) {
    lightcc_tensor tensor = tensor_of(x, shape.data());
    tensor.ndim = ndim;
    const lightcc_request request = request_of(kind, "x", &tensor, count, LIGHTCC_BLOCK);
    return lightcc_submit(&request);
  };
  for (int kind : {LIGHTCC_ALLREDUCE, LIGHTCC_ALLGATHER, LIGHTCC_BROADCAST, LIGHTCC_ALLTOALL, LIGHTCC_REDUCESCATTER}) {
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{0, 1 << 30, 1 << 30},
                                              {1 << 30, 1 << 30, 1 << 30},
                                              {-1},
                                              {int64_t(1) << 47},
                                              std::vector<int64_t>(65, 1)})
      EXPECT_EQ(submit(kind, shape, int(shape.size())), -LIGHTCC_INVALID_ARGUMENT) << kind << " " << shape.size();
    EXPECT_EQ(submit(kind, {1}, -1), -LIGHTCC_INVALID_ARGUMENT);
    EXPECT_EQ(submit(kind, {1}, 1, 0), -LIGHTCC_INVALID_ARGUMENT);
    EXPECT_EQ(submit(kind, {1}, 1, -1), -LIGHTCC_INVALID_ARGUMENT);
  }
  for (int kind : {LIGHTCC_ALLGATHER, LIGHTCC_ALLTOALL})
    EXPECT_EQ(submit(kind, {int64_t(1) << 47, 0}, 2), -LIGHTCC_INVALID_ARGUMENT) << "rows without elements";
  EXPECT_EQ(submit(LIGHTCC_BROADCAST, {1}, 1), 0) << lightcc_error();
}

TEST_F(Api, ANegativeTimeIsNone) {
  const int64_t handle = lightcc_join();
  ASSERT_GT(handle, 0);
  EXPECT_LE(lightcc_wait(handle, -1), LIGHTCC_PENDING);
  EXPECT_EQ(lightcc_finish(handle, 10'000), LIGHTCC_OK);
}

Caller second;
std::vector<float> y{5};

TEST_F(Api, DoneMaySubmit) {
  std::vector<float> x{1};
  Caller first;
  first.then = [] { EXPECT_EQ(second.submit(LIGHTCC_ALLGATHER, "y", y, 0), 0); };
  EXPECT_EQ(first.submit(LIGHTCC_ALLGATHER, "x", x, LIGHTCC_BLOCK), 0);
  EXPECT_EQ(first.dones, 1);
  barrier();
  EXPECT_EQ(second.dones, 1);
  EXPECT_EQ(second.memory, y);
}

int64_t allreduce(std::vector<float>& x, const char* name) {
  const int64_t length = int64_t(x.size());
  const lightcc_tensor tensor = tensor_of(x, &length);
  const lightcc_request request = request_of(LIGHTCC_ALLREDUCE, name, &tensor, 1);
  return lightcc_submit(&request);
}

// Here, with nobody else, it would otherwise be taken for a millisecond.
TEST_F(Api, AHandleThatIsGivenBackFreesItsName) {
  std::vector<float> x{1, 2};
  for (int turn = 0; turn < 100; ++turn) {
    int64_t handle = allreduce(x, "x");
    while (lightcc_wait(handle, 100) == LIGHTCC_PENDING) continue;
    lightcc_release(handle);
    handle = allreduce(x, "x");
    while (lightcc_poll(handle) == 0) continue;
    const int64_t second = allreduce(x, "x");
    EXPECT_GT(second, 0) << lightcc_error();
    barrier();
    lightcc_release(handle);
    lightcc_release(second);
    int64_t last = allreduce(x, "x");
    EXPECT_GT(last, 0) << lightcc_error();
    while (lightcc_finish_all(&last, 1, 100) == LIGHTCC_PENDING) continue;
  }
}

TEST_F(Api, MemoryAfterTheEndOfAnEpochIsRefusedWithItsCause) {
  EXPECT_EQ(lightcc_abort("rank 1 has left"), LIGHTCC_OK);
  EXPECT_EQ(lightcc_alloc(100), nullptr);
  EXPECT_STREQ(lightcc_error(), "memory of 100 bytes for tensors: rank 1 has left");
}

TEST(NoEpoch, IsSaidInTheWordsOfThePackageInUse) {
  lightcc_name_init("lightcc.torch.init()");
  EXPECT_EQ(lightcc_abort(""), LIGHTCC_SHUT_DOWN);
  EXPECT_STREQ(lightcc_error(), "Horovod has not been initialized; use hvd.init(). lightcc is not initialised: call "
                                "lightcc.torch.init() first");
  lightcc_name_init("init()");
}

}  // namespace
}  // namespace lightcc
