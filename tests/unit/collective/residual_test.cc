// What is left behind, when tensors are cut anew and when it comes from a checkpoint.
#include "collective/residual.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace lightcc
