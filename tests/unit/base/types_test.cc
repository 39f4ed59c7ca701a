// The words that every layer shares, as numbers of the C API and as text.
#include "base/types.h"

#include <gtest/gtest.h>

#include "base/limits.h"
#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

TEST(Types, EachDtypeHasItsNameAndWidth) {
  const struct { DType dtype; const char* name; size_t bytes; bool floating; } rows[] = {
      {DType::uint8, "uint8", 1, false},    {DType::int8, "int8", 1, false},      {DType::uint16, "uint16", 2, false},
      {DType::int16, "int16", 2, false},    {DType::int32, "int32", 4, false},    {DType::int64, "int64", 8, false},
      {DType::float16, "float16", 2, true}, {DType::float32, "float32", 4, true}, {DType::float64, "float64", 8, true},
      {DType::boolean, "bool", 1, false},   {DType::bfloat16, "bfloat16", 2, true},
      {DType::uint32, "uint32", 4, false},  {DType::uint64, "uint64", 8, false}};
  ASSERT_EQ(std::size(rows), size_t(kDTypes));
  for (int value = 0; value < kDTypes; ++value) {
    const auto& row = rows[value];
    EXPECT_EQ(int(row.dtype), value) << row.name << " is this number in the C API";
    EXPECT_STREQ(name_of(row.dtype), row.name);
    EXPECT_EQ(size_of(row.dtype), row.bytes) << row.name;
    EXPECT_EQ(is_floating(row.dtype), row.floating) << row.name;
  }
}

TEST(Types, OperationsAndKindsHaveTheirNames) {
  const char* ops[] = {"average", "sum", "adasum", "min", "max", "product"};
  for (int op = 0; op <= int(ReduceOp::product); ++op) EXPECT_STREQ(name_of(ReduceOp(op)), ops[op]);
  const char* kinds[] = {"allreduce", "allgather", "broadcast",       "alltoall",           "reducescatter", "barrier",
                         "send",      "recv",      "add_process_set", "remove_process_set", "join"};
  ASSERT_EQ(std::size(kinds), size_t(kKinds));
  for (int kind = 0; kind < kKinds; ++kind) EXPECT_STREQ(name_of(Kind(kind)), kinds[kind]);
}

TEST(Types, ShapesAndRanksAsText) {
  EXPECT_EQ(text_of(Shape{}), "[]");
  EXPECT_EQ(text_of(Shape{0}), "[0]");
  EXPECT_EQ(text_of(Shape{2, -3, INT64_MAX}), "[2, -3, 9223372036854775807]");
  EXPECT_EQ(text_of(std::vector<int>{}), "");
  EXPECT_EQ(text_of(std::vector<int>{1, 4, 5}), "1, 4, 5");
}

TEST(Types, AScalarIsOneElement) {
  EXPECT_EQ(count_of({}), 1);
  EXPECT_EQ(count_of({2, 3, 4}), 24);
  EXPECT_EQ(count_of({2, 0, 4}), 0);
}

TEST(Types, AShapeIsCountableIfNoPartOfItOverflows) {
  const Shape most_dimensions(kMostDimensions, 1), too_many(kMostDimensions + 1, 1);
  const struct { Shape shape; bool countable; } rows[] = {
      {{}, true},
      {{0}, true},
      {{kMostElements}, true},
      {{kMostElements + 1}, false},
      {{kMostElements / 2, 2}, true},
      {{kMostElements / 2, 3}, false},
      {{kMostElements, 0}, true},
      {{0, kMostElements}, true},
      {{kMostElements, 0, 2}, false},  // another rank may have rows where this one has none
      {{0, kMostElements + 1}, false},
      {{INT64_MAX, INT64_MAX}, false},
      {{int64_t(1) << 32, int64_t(1) << 32}, false},  // 2^64 is 0 to careless arithmetic
      {{-1}, false},
      {{0, -1}, false},
      {{-2, -2}, false},
      {{INT64_MIN}, false},
      {most_dimensions, true},
      {too_many, false}};
  for (auto& [shape, countable] : rows) EXPECT_EQ(is_countable(shape), countable) << text_of(shape);
}

TEST(Types, SizesAreRoundedUpToWholeUnits) {
  const struct { size_t n, unit, rounded; } rows[] = {
      {0, kLine, 0}, {1, kLine, 64}, {64, kLine, 64}, {65, kLine, 128}, {7, 1, 7}, {10, 3, 12}, {4097, 4096, 8192}};
  for (auto& row : rows) EXPECT_EQ(round_up(row.n, row.unit), row.rounded) << row.n << " in units of " << row.unit;
  EXPECT_EQ(round_up(1), kLine);
}

}  // namespace
}  // namespace lightcc
