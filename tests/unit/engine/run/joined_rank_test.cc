// What a rank that has joined puts into the others' collectives.
#include "engine/run/joined_rank.h"

#include <gtest/gtest.h>

#include <limits>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

Response response(Kind kind, std::vector<TensorSpec> tensors, ReduceOp op = ReduceOp::sum, double pre = 1) {
  Response response;
  response.key = key_of(kind, "x");
  response.absent = {0, 2};
  response.what.kind = kind, response.what.op = op, response.what.pre = pre;
  response.what.tensors = std::move(tensors);
  return response;
}

BatchItem placeholder(Kind kind, std::vector<TensorSpec> tensors, ReduceOp op = ReduceOp::sum, double pre = 1) {
  return JoinedRank::placeholder(response(kind, std::move(tensors), op, pre));
}

class JoinedRanks : public testing::Test {
 protected:
  // Until the batch can run; how many calls that takes.
  int prepare(const std::vector<BatchItem>& batch) {
    for (int calls = 1; calls < 1000; ++calls)
      if (joined.prepare(batch)) return calls;
    ADD_FAILURE() << "it never can";
    return 0;
  }
  // The batch's tensors as numbers, one after the other.
  template <class T> static std::vector<T> values(const std::vector<BatchItem>& batch) {
    std::vector<T> all;
    for (const BatchItem& item : batch)
      for (size_t t = 0; t < item.request->inputs.size(); ++t) {
        auto* data = static_cast<const T*>(item.request->inputs[t]);
        all.insert(all.end(), data, data + count_of(item.request->what.tensors[t].shape));
      }
    return all;
  }

  const std::shared_ptr<Arena> arena = Arena::create(4096);
  JoinedRank joined{arena};
};

TEST_F(JoinedRanks, APlaceholderIsTheOthersRequestWithoutMemory) {
  Response others = response(Kind::allgather, {{DType::int32, {0, 2}}, {DType::float64, {0}}});
  others.rows = {{0, 5, 0}, {0, 7, 0}};
  const BatchItem item = JoinedRank::placeholder(others);
  EXPECT_EQ(item.request->title(), "allgather of tensor 'x'");
  EXPECT_EQ(item.request->what, others.what);
  EXPECT_EQ(item.rows, others.rows);
  EXPECT_EQ(item.absent, 2);
  EXPECT_TRUE(item.placeholder);
  EXPECT_EQ(item.request->inputs, (std::vector<const void*>{nullptr, nullptr}));
  EXPECT_EQ(item.request->outputs, (std::vector<void*>{nullptr, nullptr}));
}

TEST_F(JoinedRanks, InputsChangeNoResult) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const struct { Kind kind; ReduceOp op; double pre; float input; } rows[] = {
      {Kind::allreduce, ReduceOp::sum, 1, 0},          {Kind::allreduce, ReduceOp::average, 3, 0},
      {Kind::allreduce, ReduceOp::adasum, 1, 0},       {Kind::allreduce, ReduceOp::product, 1, 1},
      {Kind::allreduce, ReduceOp::min, 1, kInfinity},  {Kind::allreduce, ReduceOp::max, 1, -kInfinity},
      {Kind::allreduce, ReduceOp::min, -2, -kInfinity}, {Kind::reducescatter, ReduceOp::sum, 1, 0},
      {Kind::reducescatter, ReduceOp::max, 1, -kInfinity}};
  for (auto& row : rows) {
    const std::vector<BatchItem> batch{placeholder(row.kind, {{DType::float32, {3, 5}}}, row.op, row.pre)};
    prepare(batch);
    EXPECT_EQ(values<float>(batch), std::vector<float>(15, row.input)) << name_of(row.kind) << " " << name_of(row.op);
  }
}

TEST_F(JoinedRanks, ABatchLiesInOnePieceEachTensorOnALine) {
  const std::vector<BatchItem> batch{
      placeholder(Kind::allreduce, {{DType::uint8, {1}}, {DType::uint8, {0}}}, ReduceOp::product),
      placeholder(Kind::allreduce, {{DType::uint8, {65}}, {DType::uint8, {}}}, ReduceOp::product)};
  prepare(batch);
  auto* begin = static_cast<const std::byte*>(batch[0].request->inputs[0]);
  EXPECT_EQ(size_t(arena->offset_of(begin, 4 * kLine)) % kLine, 0u) << "memory that the ranks of the host share";
  const std::vector<const void*> places{begin, begin + kLine, begin + kLine, begin + 3 * kLine};
  std::vector<const void*> found = batch[0].request->inputs;
  found.insert(found.end(), batch[1].request->inputs.begin(), batch[1].request->inputs.end());
  EXPECT_EQ(found, places) << "the second has no elements";
  for (const BatchItem& item : batch)
    for (size_t t = 0; t < 2; ++t) EXPECT_EQ(item.request->outputs[t], item.request->inputs[t]) << "runs in place";
  EXPECT_EQ(values<uint8_t>(batch), std::vector<uint8_t>(67, 1));
}

TEST_F(JoinedRanks, MuchIsFilledPieceByPiece) {
  constexpr int64_t kCount = 500'001;  // of 8 bytes
  const std::vector<BatchItem> batch{
      placeholder(Kind::allreduce, {{DType::int64, {kCount}}, {DType::int64, {3}}}, ReduceOp::max),
      placeholder(Kind::allreduce, {{DType::int64, {1}}}, ReduceOp::max)};
  EXPECT_GT(prepare(batch), 2) << "others wait for the progress lock meanwhile";
  EXPECT_EQ(values<int64_t>(batch), std::vector<int64_t>(kCount + 4, INT64_MIN));
}

TEST_F(JoinedRanks, OnlyReductionsAndBroadcastsNeedMemoryAndABroadcastNoNumbers) {
  for (Kind kind : {Kind::allgather, Kind::alltoall, Kind::barrier, Kind::join, Kind::broadcast}) {
    const std::vector<BatchItem> batch{placeholder(kind, {{DType::float32, {1 << 20}}})};
    EXPECT_TRUE(joined.prepare(batch)) << name_of(kind);
    EXPECT_EQ(batch[0].request->inputs[0] != nullptr, kind == Kind::broadcast) << name_of(kind);
  }
}

TEST_F(JoinedRanks, TheMemoryIsUsedAgainUntilThisRankHasData) {
  const auto run = [&] {
    const std::vector<BatchItem> batch{placeholder(Kind::allreduce, {{DType::float32, {100}}})};
    prepare(batch);
    return static_cast<float*>(batch[0].request->outputs[0]);
  };
  float* first = run();
  std::fill_n(first, 100, 7.0f);  // the result that the batch leaves
  EXPECT_EQ(run(), first);
  EXPECT_EQ(std::vector<float>(first, first + 100), std::vector<float>(100, 0));
  joined.clear();
  EXPECT_EQ(arena->offset_of(first, 1), -1) << "given back";
  joined.clear();
  EXPECT_GE(arena->offset_of(run(), 1), 0);
}

}  // namespace
}  // namespace lightcc
