// What is left behind, when tensors are cut anew and when it comes from a checkpoint.
#include "collective/residual.h"

#include <gtest/gtest.h>

#include <utility>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Floats = std::vector<float>;

TEST(Residual, BeginsAtZeroAndStaysWhileTheCutIsTheSame) {
  Residual residual;
  residual.cut(10, 0, 2, {{2, 3}, {5, 2}}, false);
  ASSERT_EQ(residual.pieces().size(), 2u);
  EXPECT_EQ(residual.pieces()[0].values, Floats(3));
  EXPECT_TRUE(residual.pieces()[0].velocity.empty());
  residual.pieces()[0].values = {1, 2, 3};
  residual.cut(10, 0, 2, {{2, 3}, {5, 2}}, false);
  EXPECT_EQ(residual.pieces()[0].values, (Floats{1, 2, 3}));
}

TEST(Residual, AnotherCutKeepsWhatIsStillOwned) {
  Residual residual;
  residual.cut(10, 0, 2, {{2, 3}}, true);
  residual.pieces()[0].values = {1, 2, 3};
  residual.pieces()[0].velocity = {4, 5, 6};
  residual.cut(10, 1, 3, {{0, 4}, {8, 2}}, true);
  EXPECT_EQ(residual.pieces()[0].values, (Floats{0, 0, 1, 2}));
  EXPECT_EQ(residual.pieces()[0].velocity, (Floats{0, 0, 4, 5}));
  EXPECT_EQ(residual.pieces()[1].values, Floats(2));
}

TEST(Residual, AnotherNumberOfElementsIsAnotherTensor) {
  Residual residual;
  residual.cut(4, 0, 2, {{0, 4}}, false);
  residual.pieces()[0].values = {1, 2, 3, 4};
  residual.cut(5, 0, 2, {{0, 4}}, false);
  EXPECT_EQ(residual.pieces()[0].values, Floats(4));
}

// Three nodes' parts on two nodes: the sum over nodes stays, whoever owns what.
TEST(Residual, SavedPartsAreAddedUpWhereTheyBelong) {
  double sum = 0;
  for (int node = 0; node < 2; ++node)
    for (const Residual::Range range : {Residual::Range{0, 1}, Residual::Range{1, 3}}) {
      Residual residual;
      for (int from = 0; from < 3; ++from) residual.add_saved(4, {false, from, 0, {1, 2, 3, 4}});
      residual.add_saved(4, {true, 0, 1, {7}});
      residual.cut(4, node, 2, {range}, true);
      for (const float value : residual.pieces()[0].values) sum += double(value);
      const Floats velocity = residual.pieces()[0].velocity;
      EXPECT_EQ(std::count(velocity.begin(), velocity.end(), 7.0f), node == 0 && range.first == 1);
    }
  EXPECT_EQ(sum, 3 * (1 + 2 + 3 + 4));
}

TEST(Residual, WhatWasSavedOfAnotherShapeIsDropped) {
  Residual residual;
  residual.add_saved(5, {false, 0, 0, {1, 1, 1, 1, 1}});
  residual.cut(4, 0, 2, {{0, 4}}, false);
  EXPECT_EQ(residual.pieces()[0].values, Floats(4));
}

TEST(Residual, IsHeldByOneAtATime) {
  Residual residual;
  EXPECT_TRUE(residual.try_hold());
  EXPECT_FALSE(residual.try_hold());
  residual.let_go();
  EXPECT_TRUE(residual.try_hold());
}

// Values in a device's memory, which come home in two steps.
struct ValuesOnDevice : DeviceResidual {
  struct Copy : ResidualCopy {
    explicit Copy(const Floats& from) { values = from; }
    bool step() override { return !std::exchange(is_there, true); }
    bool is_there = false;
  };
  explicit ValuesOnDevice(Floats from) : values(std::move(from)) {}
  int64_t count() const override { return int64_t(values.size()); }
  std::unique_ptr<ResidualCopy> copy() const override { return std::make_unique<Copy>(values); }
  Floats values;
};

// An epoch may end while values are on their way home, and the device encode in the next one.
TEST(Residual, ValuesThatADeviceHasReplacedDoNotComeHome) {
  Residual residual;
  const auto cut = [&] { residual.cut(2, 0, 2, {{0, 2}}, false); };
  cut();
  const auto device = std::make_shared<ValuesOnDevice>(Floats{1, 2});
  residual.pieces()[0].values = {};
  residual.pieces()[0].device = device;
  EXPECT_TRUE(residual.step_home());
  cut();
  device->values = {3, 4};
  while (residual.step_home()) continue;
  EXPECT_EQ(residual.pieces()[0].values, (Floats{3, 4}));
  EXPECT_EQ(residual.pieces()[0].device, nullptr);
}

}  // namespace
}  // namespace lightcc
