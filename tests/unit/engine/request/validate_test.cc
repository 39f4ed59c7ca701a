// What a rank can know to be wrong about its own request, and about the rows that it is told to run it with.
#include "engine/request/validate.h"

#include <gtest/gtest.h>

#include "base/limits.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

const Group kGroup(3, {0, 2, 5}, 2, Topology::one_host(6));  // and this is rank 2, member 1

using Shapes = std::vector<Shape>;

Announcement of_kind(Kind kind, const Shapes& shapes = {{6, 2}}, DType dtype = DType::float32) {
  Announcement what;
  what.kind = kind, what.root = 5;
  for (const Shape& shape : shapes) what.tensors.push_back({dtype, shape});
  return what;
}
Announcement alltoall(const Shapes& shapes, std::vector<int64_t> splits) {
  Announcement what = of_kind(Kind::alltoall, shapes);
  what.splits = std::move(splits);
  return what;
}
Announcement with_op(Announcement what, ReduceOp op) {
  what.op = op;
  return what;
}
Announcement from_root(int root) {
  Announcement what = of_kind(Kind::broadcast);
  what.root = root;
  return what;
}

// Why it is refused, without the title and the rank that each such text begins with. "": it is taken, and `what` is
// then as validate() has completed it.
std::string refused(Announcement& what, const Group* group = &kGroup, int rank = 2) {
  Request request;
  request.group = 3, request.key = key_of(what.kind, "x"), request.what = what;
  const std::string begin = request.title() + " on rank " + std::to_string(rank) + ": ";
  try {
    validate(request, group, rank);
    what = request.what;
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    EXPECT_TRUE(std::string(error.what()).starts_with(begin)) << error.what();
    return std::string(error.what()).substr(begin.size());
  }
}

TEST(Validate, WhatIsRightIsTaken) {
  for (Announcement what :
       {of_kind(Kind::allreduce), of_kind(Kind::allreduce, {{}}), of_kind(Kind::allreduce, {{0}, {3}}),
        of_kind(Kind::allgather, {{0, 4}}), of_kind(Kind::broadcast), of_kind(Kind::reducescatter, {{1}}),
        of_kind(Kind::barrier, {}), alltoall({{6}}, {1, 2, 3}), alltoall({{6}}, {0, 0, 0}), alltoall({{0}}, {}),
        with_op(of_kind(Kind::allreduce, {{4}}, DType::bfloat16), ReduceOp::adasum)})
    EXPECT_EQ(refused(what), "") << name_of(what.kind);
}

TEST(Validate, WhatIsWrongIsNamed) {
  const struct { Announcement what; const char* why; } rows[] = {
      {of_kind(Kind::join, {}), "join() is of the whole job, not of process set 3 (ranks 0, 2, 5)"},
      {from_root(1), "root rank 1 is not in process set 3 (ranks 0, 2, 5)"},
      {from_root(-1), "root rank -1 is not in process set 3 (ranks 0, 2, 5)"},
      {with_op(of_kind(Kind::allreduce, {{4}}, DType::boolean), ReduceOp::adasum),
       "Adasum combines float16, bfloat16, float32 and float64 tensors, not bool"},
      {with_op(of_kind(Kind::reducescatter), ReduceOp::adasum),
       "Adasum combines whole tensors; reducescatter has every other operation"},
      {of_kind(Kind::allgather, {{2}, {}}), "a scalar has no dimension 0"},
      {of_kind(Kind::alltoall, {{}}), "a scalar has no dimension 0"},
      {of_kind(Kind::reducescatter, {{}}), "a scalar has no dimension 0"},
      {alltoall({{7, 2}}, {}), "7 rows cannot be split equally among 3 ranks; give splits"},
      {alltoall({{3LL << 31}}, {}), "2147483648 rows for one rank are more than 2^31 - 1"},
      {alltoall({{6}}, {6}), "1 splits for 3 ranks"},
      {alltoall({{6}}, {3, -1, 4}), "a split is negative"},
      {alltoall({{6}}, {3, 2, 2}), "splits sum to 7, more than the 6 rows there are"},
      {alltoall({{6}, {2}}, {2, 2, 2, 1, 1, 1}), "splits sum to 3, more than the 2 rows there are"},
      {of_kind(Kind::allreduce, {{kMostElements, 2}}),
       "a tensor of shape [8796093022208, 2] is larger than lightcc can send"},
      {of_kind(Kind::broadcast, {{kMostElements}, {kMostElements}, {1}}),  // of 4 bytes each
       "a tensor of shape [1] is larger than lightcc can send"},
      {of_kind(Kind::allgather, {{kMostElements, 1}}),  // and as much from each of the others
       "a tensor of shape [8796093022208, 1] is larger than lightcc can send"}};
  for (auto& row : rows) {
    Announcement what = row.what;
    EXPECT_EQ(refused(what), row.why);
  }
}

TEST(Validate, TheProcessSetMustExistAndHaveThisRank) {
  Announcement what = of_kind(Kind::allreduce);
  EXPECT_EQ(refused(what, nullptr), "process set 3 does not exist");
  EXPECT_EQ(refused(what, &kGroup, 4), "this rank is not in process set 3 (ranks 0, 2, 5)");
}

TEST(Validate, SplitsThatAreNotGivenAreEqualParts) {
  Announcement what = alltoall({{6, 2}, {0}, {3}}, {});
  EXPECT_EQ(refused(what), "");
  EXPECT_EQ(what.splits, (std::vector<int64_t>{2, 2, 2, 0, 0, 0, 1, 1, 1}));
  what = alltoall({{6}}, {0, 1, 2});
  EXPECT_EQ(refused(what), "");
  EXPECT_EQ(what.splits, (std::vector<int64_t>{0, 1, 2})) << "as given";
}

// ---- the answer

using Rows = std::vector<std::vector<int64_t>>;

bool damaged(const Announcement& what, Rows rows, bool absent = false) {
  try {
    validate_rows({0, 0, true, "allgather.x", std::move(rows)}, what, 1, 3, absent);
    return false;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::internal);
    EXPECT_STREQ(error.what(), "told to run allgather.x with rows that nobody announced");
    return true;
  }
}

TEST(ValidateRows, ThoseOfThisMemberAreWhatItAnnounced) {
  const Announcement gather = of_kind(Kind::allgather, {{6, 2}, {4}}), exchange = alltoall({{6}}, {1, 2, 3});
  EXPECT_FALSE(damaged(gather, {{0, 6, 9}, {1, 4, 0}}));
  EXPECT_TRUE(damaged(gather, {{0, 6, 9}, {4, 1, 0}}));
  EXPECT_FALSE(damaged(exchange, {{7, 8, 9, 1, 2, 3, 0, 0, 0}}));
  EXPECT_TRUE(damaged(exchange, {{1, 2, 3, 7, 8, 9, 0, 0, 0}}));
  EXPECT_TRUE(damaged(exchange, {{7, 8, 9, 1, 2, 4, 0, 0, 0}}));
}

TEST(ValidateRows, OfAMemberThatHasJoinedAreNone) {
  const Announcement gather = of_kind(Kind::allgather, {{0, 2}}), exchange = of_kind(Kind::alltoall, {{0}});
  EXPECT_FALSE(damaged(gather, {{5, 0, 9}}, true));
  EXPECT_TRUE(damaged(gather, {{5, 1, 9}}, true));
  EXPECT_FALSE(damaged(exchange, {{1, 1, 1, 0, 0, 0, 1, 1, 1}}, true));
  EXPECT_TRUE(damaged(exchange, {{1, 1, 1, 0, 0, 1, 1, 1, 1}}, true));
}

TEST(ValidateRows, EachTensorHasARowForEachMember) {
  const Announcement gather = of_kind(Kind::allgather, {{6}});
  for (const Rows& rows : {Rows{}, Rows{{}}, Rows{{6, 6}}, Rows{{6, 6, 6, 6}}, Rows{{6, 6, 6}, {6, 6, 6}}})
    EXPECT_TRUE(damaged(gather, rows));
  EXPECT_TRUE(damaged(alltoall({{6}}, {1, 2, 3}), {{1, 2, 3}}));
}

TEST(ValidateRows, OfOtherKindsThereAreNone) {
  for (Kind kind : {Kind::allreduce, Kind::broadcast, Kind::reducescatter, Kind::barrier}) {
    EXPECT_FALSE(damaged(of_kind(kind), {}));
    EXPECT_TRUE(damaged(of_kind(kind), {{6, 6, 6}})) << name_of(kind);
  }
  EXPECT_FALSE(damaged(of_kind(Kind::join, {}), {{2}})) << "the rank that joined last";
}

TEST(ValidateRows, OthersAreWithinWhatCanBeSent) {
  const Announcement gather = of_kind(Kind::allgather, {{6}}), wide = of_kind(Kind::allgather, {{6, kMostElements}});
  EXPECT_FALSE(damaged(gather, {{kMostRequestBytes - 6, 6, 0}}));
  EXPECT_TRUE(damaged(gather, {{kMostRequestBytes - 5, 6, 0}}));
  EXPECT_TRUE(damaged(gather, {{-1, 6, 0}}));
  EXPECT_TRUE(damaged(gather, {{INT64_MAX, 6, INT64_MAX}}));
  EXPECT_FALSE(damaged(wide, {{1, 6, 1}}));
  EXPECT_TRUE(damaged(wide, {{1, 6, 2}})) << "elements, not rows, are too many";
  EXPECT_TRUE(damaged(wide, {{1 << 22, 6, 0}})) << "the product overflows";
}

}  // namespace
}  // namespace lightcc
