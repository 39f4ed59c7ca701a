// Ranks that disagree read what differs and who has what.
#include "engine/negotiate/control/disagreement.h"

#include <gtest/gtest.h>

#include <cmath>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Tensors = std::vector<TensorSpec>;

Announcement of_kind(Kind kind, Tensors tensors = {{DType::float32, {4}}}) {
  Announcement what;
  what.kind = kind, what.tensors = std::move(tensors);
  return what;
}
Announcement allreduce(Tensors tensors) { return of_kind(Kind::allreduce, std::move(tensors)); }
Announcement with_factors(double pre, double post) {
  Announcement what = of_kind(Kind::allreduce);
  what.pre = pre, what.post = post;
  return what;
}
TensorSpec float32(Shape shape) { return {DType::float32, std::move(shape)}; }

// Between the ranks 4 and 9, which have `ours`, and 7.
std::string between(const Announcement& ours, const Announcement& theirs) {
  return disagreement({ours, theirs, ours}, {1, 1, 1}, {4, 7, 9});
}

TEST(DisagreementText, SaysWhatDiffersAndWhoHasWhat) {
  Announcement op = of_kind(Kind::allreduce), root = of_kind(Kind::broadcast);
  op.op = ReduceOp::max, root.root = 7;
  const struct { Announcement ours, theirs; const char* text; } rows[] = {
      {of_kind(Kind::allreduce), of_kind(Kind::broadcast),
       "operation: ranks 4, 9 have allreduce, rank 7 has broadcast"},
      {allreduce({float32({4})}), allreduce({float32({5})}), "shape: ranks 4, 9 have [4], rank 7 has [5]"},
      {allreduce({float32({4})}), allreduce({float32({})}), "shape: ranks 4, 9 have [4], rank 7 has []"},
      {allreduce({float32({4})}), allreduce({{DType::int32, {4}}}),
       "dtype: ranks 4, 9 have float32, rank 7 has int32"},
      {of_kind(Kind::allreduce), op, "reduce op: ranks 4, 9 have sum, rank 7 has max"},
      {of_kind(Kind::broadcast), root, "root rank: ranks 4, 9 have 0, rank 7 has 7"},
      {with_factors(1, 1), with_factors(0.25, 1), "prescale factor: ranks 4, 9 have 1, rank 7 has 0.25"},
      {with_factors(1, 1), with_factors(1, 1e-3), "postscale factor: ranks 4, 9 have 1, rank 7 has 0.001"},
      {of_kind(Kind::allgather, {float32({1, 2, 3})}), of_kind(Kind::allgather, {float32({5, 2, 4})}),
       "shape: ranks 4, 9 have [any, 2, 3], rank 7 has [any, 2, 4]"},
      {of_kind(Kind::alltoall, {float32({4})}), of_kind(Kind::alltoall, {float32({4, 1})}),
       "shape: ranks 4, 9 have [any], rank 7 has [any, 1]"},
      {allreduce({float32({4})}), allreduce({float32({4}), float32({4})}),
       "number of tensors: ranks 4, 9 have 1, rank 7 has 2"},
      {allreduce({float32({4}), float32({4})}), allreduce({float32({4}), float32({2, 2})}),
       "shape of tensor 2of2: ranks 4, 9 have [4], rank 7 has [2, 2]"},
      {allreduce({float32({4}), float32({5})}), allreduce({{DType::float64, {4}}, float32({6})}),
       "dtype of tensor 1of2: ranks 4, 9 have float32, rank 7 has float64"}};
  for (auto& row : rows) EXPECT_EQ(between(row.ours, row.theirs), std::string("ranks disagree on ") + row.text);
}

TEST(DisagreementText, OfFactorsShowsEveryDigitThatDiffers) {
  EXPECT_EQ(between(with_factors(1.0 / 3, 1), with_factors(1.0f / 3, 1)),
            "ranks disagree on prescale factor: ranks 4, 9 have 0.3333333333333333, rank 7 has 0.3333333432674408");
  EXPECT_EQ(between(with_factors(1, 1), with_factors(1, std::nextafter(1.0, 2))),
            "ranks disagree on postscale factor: ranks 4, 9 have 1, rank 7 has 1.0000000000000002");
  EXPECT_EQ(between(with_factors(NAN, 1), with_factors(NAN, 1)), "") << "not a number, on all ranks alike";
}

TEST(DisagreementText, WhatMayDifferIsNoDisagreement) {
  Announcement ours = of_kind(Kind::alltoall, {float32({4, 2})}), theirs = of_kind(Kind::alltoall, {float32({9, 2})});
  ours.splits = {1, 3}, theirs.splits = {9, 0};
  EXPECT_EQ(between(ours, theirs), "");
  EXPECT_EQ(between(of_kind(Kind::allgather, {float32({0, 5})}), of_kind(Kind::allgather, {float32({7, 5})})), "");
  EXPECT_NE(between(of_kind(Kind::reducescatter, {float32({1})}), of_kind(Kind::reducescatter, {float32({2})})), "");
  EXPECT_EQ(between(of_kind(Kind::barrier, {}), of_kind(Kind::barrier, {})), "");
}

TEST(DisagreementText, SidesComeInTheOrderOfTheirRanks) {
  const std::vector<Announcement> all{allreduce({float32({2})}), allreduce({float32({3})}), allreduce({float32({1})})};
  EXPECT_EQ(disagreement(all, {1, 1, 1}, {0, 1, 2}),
            "ranks disagree on shape: rank 0 has [2], rank 1 has [3], rank 2 has [1]");
}

TEST(DisagreementText, WhoHasAnnouncedNothingHasNoSay) {
  const Announcement four = allreduce({float32({4})}), five = allreduce({float32({5}), float32({5})});
  EXPECT_EQ(disagreement({five, four, four}, {0, 1, 1}, {0, 1, 2}), "");
  EXPECT_EQ(disagreement({five, four, four}, {0, 1, 0}, {0, 1, 2}), "");
  EXPECT_EQ(disagreement({five, four, four}, {0, 0, 0}, {0, 1, 2}), "");
  EXPECT_EQ(disagreement({four, five, four}, {0, 1, 1}, {0, 1, 2}),
            "ranks disagree on number of tensors: rank 1 has 2, rank 2 has 1");
}

}  // namespace
}  // namespace lightcc
