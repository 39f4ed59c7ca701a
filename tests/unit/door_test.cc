// The C door with callbacks, in a world of one. What it does with several ranks is tested through Python.
#include "api/lightcc.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

struct Door : testing::Test {
  Door() { EXPECT_EQ(lightcc_init(), LIGHTCC_OK) << lightcc_error(); }
  ~Door() override { EXPECT_EQ(lightcc_shutdown(), LIGHTCC_OK) << lightcc_error(); }
};

struct Caller {
  int status = -1, dones = 0;
  std::vector<float> memory;
  std::vector<int32_t> rows;
  void (*then)() = nullptr;  // called by done

  int64_t submit(int kind, const char* name, std::vector<float>& tensor, int flags) {
    const void* input = tensor.data();
    void* output = tensor.data();
    const int32_t dtype = LIGHTCC_FLOAT32, ndim = 1;
    const int64_t shape = int64_t(tensor.size());
    const lightcc_callbacks callbacks{done, allocate, this, received};
    return lightcc_submit_group(kind, name, 0, 1, &input, kind == LIGHTCC_ALLREDUCE ? &output : nullptr, &dtype, &ndim,
                                &shape, LIGHTCC_SUM, 0, 2, 1, nullptr, flags, &callbacks);
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
  EXPECT_EQ(lightcc_submit(LIGHTCC_BARRIER, nullptr, 0, nullptr, nullptr, 0, 0, nullptr, 0, 0, 1, 1, nullptr,
                           LIGHTCC_BLOCK),
            0)
      << lightcc_error();
}

TEST_F(Door, DoneTakesThePlaceOfAHandle) {
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

TEST_F(Door, AnAlltoallTellsWhatItReceived) {
  std::vector<float> x{1, 2, 3};
  Caller caller;
  EXPECT_EQ(caller.submit(LIGHTCC_ALLTOALL, "x", x, LIGHTCC_BLOCK), 0);
  EXPECT_EQ(caller.dones, 1);
  EXPECT_EQ(caller.rows, (std::vector<int32_t>{3}));
  EXPECT_EQ(caller.memory, x);
}

TEST_F(Door, ARefusedSubmissionIsNotDone) {
  std::vector<float> x{1};
  Caller caller;
  EXPECT_EQ(caller.submit(17, "x", x, 0), -LIGHTCC_INVALID_ARGUMENT);
  EXPECT_EQ(caller.dones, 0);
}

Caller second;
std::vector<float> y{5};

TEST_F(Door, DoneMaySubmit) {
  std::vector<float> x{1};
  Caller first;
  first.then = [] { EXPECT_EQ(second.submit(LIGHTCC_ALLGATHER, "y", y, 0), 0); };
  EXPECT_EQ(first.submit(LIGHTCC_ALLGATHER, "x", x, LIGHTCC_BLOCK), 0);
  EXPECT_EQ(first.dones, 1);
  barrier();
  EXPECT_EQ(second.dones, 1);
  EXPECT_EQ(second.memory, y);
}

}  // namespace
