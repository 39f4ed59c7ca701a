// Which accesses the CUDA of the other tests takes for ordered.
#include "unit/doubles/cuda_double_clocks.h"

#include <gtest/gtest.h>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using namespace test;

TEST(AccessHistories, HistoriesStayShort) {
  AccessHistory history;
  VectorClock clock;
  const char data[64] = {};
  const Actor actor{"a kernel on stream 1", 0, 3};
  for (int i = 0; i < 1000; ++i) {
    clock.advance(actor.stream);
    history.add(actor, clock, {data + i % 4 * 16, 16, i % 3 == 0});
  }
  EXPECT_LE(history.size(), 8u) << "a write and a read of each piece";
  clock.advance(actor.stream);
  history.add(actor, clock, {data, 64, true});
  EXPECT_EQ(history.size(), 1u);
  history.host_knows(clock);
  EXPECT_EQ(history.size(), 0u);
}

TEST(AccessHistories, KeepWhatOthersMayStillCollideWith) {
  const char data[16] = {};
  const Actor first{"a kernel on stream 1", 0, 1}, second{"a kernel on stream 2", 0, 2}, third{"a copy", 0, 3};
  const auto after = [](std::vector<size_t> streams) {
    VectorClock clock;
    for (size_t stream : streams) clock.advance(stream);
    return clock;
  };
  const Access read{data, 16, false}, write{data, 16, true};
  {
    AccessHistory history;
    history.add(first, after({1}), write);
    history.add(first, after({1, 1}), read);
    EXPECT_EQ(history.conflicts(third, after({3}), read, "reads").size(), 1u) << "a read hides no write";
  }
  {
    AccessHistory history;
    history.add(first, after({1}), write);
    history.add(first, after({1, 1}), {data, 8, true});
    const Access rest{data + 8, 8, false};
    EXPECT_EQ(history.conflicts(third, after({3}), rest, "reads").size(), 1u) << "nor does a smaller one";
  }
  {
    AccessHistory history;
    history.add(first, after({1}), write);
    history.add(second, after({2}), write);
    EXPECT_EQ(history.conflicts(third, after({2, 3}), read, "reads").size(), 1u) << "nor does one without order";
    EXPECT_EQ(history.conflicts(third, after({1, 2, 3}), read, "reads").size(), 0u);
  }
}

}  // namespace
}  // namespace lightcc
