#include "base/fifo.h"

#include <gtest/gtest.h>

#include <memory>

namespace lightcc {
namespace {

TEST(Fifo, GivesOutEachItemOnceInOrder) {
  Fifo<int> fifo;
  EXPECT_EQ(fifo.pop(), std::nullopt);
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 3; ++i) fifo.push(i);
    EXPECT_FALSE(fifo.empty());
    EXPECT_EQ(fifo.pop(), 0);
    EXPECT_EQ(fifo.pop(), 1);
    fifo.push(3);
    EXPECT_EQ(fifo.pop(), 2);
    EXPECT_EQ(fifo.pop(), 3);
    EXPECT_EQ(fifo.pop(), std::nullopt);
    EXPECT_TRUE(fifo.empty());
  }
}

TEST(Fifo, HoldsNothingThatItHasGivenOut) {
  Fifo<std::shared_ptr<int>> fifo;
  const auto item = std::make_shared<int>(1);
  for (int i = 0; i < 2; ++i) fifo.push(item);
  fifo.pop();
  EXPECT_EQ(item.use_count(), 2);
  fifo.pop();
  EXPECT_EQ(item.use_count(), 1);
}

}  // namespace
}  // namespace lightcc
