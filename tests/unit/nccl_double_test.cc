// The NCCL of the other tests: that it computes what NCCL does, in groups and in place too.
#include <algorithm>

#include "unit/nccl_double_ranks.h"

namespace lightcc {
namespace {

using namespace test;

constexpr size_t kCount = 37;

constexpr DType kDTypesOfNccl[] = {DType::int8, DType::uint8, DType::int32, DType::int64, DType::uint32, DType::uint64,
                                   DType::float16, DType::float32, DType::float64, DType::bfloat16};

// Small, so that products of four are exact in every dtype.
Numbers values_of(int rank, size_t count) {
  Numbers values;
  for (size_t i = 0; i < count; ++i) values.push_back(double(1 + (size_t(rank) * 5 + i) % 3));
  return values;
}

Numbers combined(ReduceOp op, int ranks, size_t count) {
  Numbers values = values_of(0, count);
  for (int rank = 1; rank < ranks; ++rank)
    for (size_t i = 0; i < count; ++i) {
      const double one = values_of(rank, count)[i];
      switch (op) {
        case ReduceOp::sum: values[i] += one; break;
        case ReduceOp::product: values[i] *= one; break;
        case ReduceOp::max: values[i] = std::max(values[i], one); break;
        default: values[i] = std::min(values[i], one);
      }
    }
  return values;
}

Numbers part_of(const Numbers& values, int rank, size_t count) {
  return Numbers(values.begin() + rank * int(count), values.begin() + (rank + 1) * int(count));
}

void every_collective(const NcclFunctions& table, auto& me, DType dtype) {
  const int type = nccl_dtype(dtype), n = me.ranks, root = n - 1;
  const size_t all = size_t(n) * kCount;
  void* input = me.memory(dtype, values_of(me.rank, all));
  void* output = me.memory(dtype, Numbers(all));
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::product, ReduceOp::max, ReduceOp::min}) {
    me.check(table.AllReduce(input, output, all, type, nccl_op(op), me.comm, me.stream));
    me.expect(output, dtype, combined(op, n, all), "AllReduce");
    me.check(table.ReduceScatter(input, output, kCount, type, nccl_op(op), me.comm, me.stream));
    me.expect(output, dtype, part_of(combined(op, n, all), me.rank, kCount), "ReduceScatter");
    me.check(table.Reduce(input, output, kCount, type, nccl_op(op), root, me.comm, me.stream));
    if (me.rank == root) me.expect(output, dtype, combined(op, n, kCount), "Reduce");
  }
  me.check(table.Broadcast(input, output, kCount, type, root, me.comm, me.stream));
  me.expect(output, dtype, values_of(root, kCount), "Broadcast");
  me.check(table.AllGather(input, output, kCount, type, me.comm, me.stream));
  for (int from = 0; from < n; ++from)
    me.expect(static_cast<char*>(output) + size_t(from) * kCount * size_of(dtype), dtype, values_of(from, kCount),
              "AllGather");
  EXPECT_EQ(table.GroupStart(), kNcclSuccess);
  EXPECT_EQ(table.Send(input, kCount, type, (me.rank + 1) % n, me.comm, me.stream), kNcclSuccess);
  EXPECT_EQ(table.Recv(output, kCount, type, (me.rank + n - 1) % n, me.comm, me.stream), kNcclSuccess);
  me.check(table.GroupEnd());
  me.expect(output, dtype, values_of((me.rank + n - 1) % n, kCount), "Recv");
}

TEST_F(NcclDoubles, EveryCollectiveOfEveryDtype) {
  for (int ranks = 1; ranks <= 4; ++ranks) each(ranks, [&](Rank& me) {
    for (const DType dtype : kDTypesOfNccl) every_collective(table, me, dtype);
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
  EXPECT_EQ(nccl.leaks(), 0u);
}

TEST_F(NcclDoubles, NumbersOfSixteenBitsAreRoundedOnceAndIntegersWrapAround) {
  each(3, [&](Rank& me) {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
      const double large = dtype == DType::float16 ? 2048 : 256;  // to which 1 adds nothing
      void* x = me.memory(dtype, {me.rank == 0 ? large : 1});
      me.check(table.AllReduce(x, x, 1, nccl_dtype(dtype), kSum, me.comm, me.stream));
      me.expect(x, dtype, {large + 2}, "sum");
    }
    void* x = me.memory(DType::int8, {100});
    me.check(table.AllReduce(x, x, 1, nccl_dtype(DType::int8), kSum, me.comm, me.stream));
    me.expect(x, DType::int8, {300 - 256}, "sum");
    me.leave();
  });
}

TEST_F(NcclDoubles, InPlaceIsWhereNcclAllowsIt) {
  each(3, [&](Rank& me) {
    const size_t all = 3 * kCount, own = size_t(me.rank) * kCount;
    float* x = me.floats(values_of(me.rank, all));
    me.check(me.all_reduce(x, x, all));
    me.expect(x, combined(ReduceOp::sum, 3, all));
    x = me.floats(values_of(me.rank, all));
    me.check(table.ReduceScatter(x, x + own, kCount, kFloat32, kSum, me.comm, me.stream));
    me.expect(x + own, part_of(combined(ReduceOp::sum, 3, all), me.rank, kCount));
    me.check(table.AllGather(x + own, x, kCount, kFloat32, me.comm, me.stream));
    me.expect(x, combined(ReduceOp::sum, 3, all));
    x = me.floats(values_of(me.rank, kCount));
    me.check(table.Broadcast(x, x, kCount, kFloat32, 1, me.comm, me.stream));
    me.expect(x, values_of(1, kCount));
    if (me.rank == 2) {
      EXPECT_EQ(table.AllGather(x, x, 1, kFloat32, me.comm, me.stream), kInvalidUsage);
      EXPECT_EQ(me.all_reduce(x, x + 1, 4), kInvalidUsage);
    }
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), (Texts{"NCCL's AllGather is called with an output that overlaps the input, but is not in "
                                  "place",
                                  "NCCL's AllReduce is called with an output that overlaps the input, but is not in "
                                  "place"}));
}

TEST_F(NcclDoubles, AGroupIsOneLaunch) {
  each(3, [&](Rank& me) {
    float *x = me.floats(values_of(me.rank, 3)), *y = me.floats({0, 0, 0}), *sum = me.floats({1});
    EXPECT_EQ(table.GroupStart(), kNcclSuccess);
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_EQ(table.GroupStart(), kNcclSuccess);
      EXPECT_EQ(table.Recv(y + peer, 1, kFloat32, peer, me.comm, me.stream), kNcclSuccess);
      EXPECT_EQ(table.Send(x + peer, 1, kFloat32, peer, me.comm, me.stream), kNcclSuccess);
      EXPECT_EQ(table.GroupEnd(), kNcclSuccess) << "which is in another";
    }
    EXPECT_EQ(me.all_reduce(sum, sum, 1), kNcclSuccess);
    me.check(table.GroupEnd());
    me.expect(sum, {3});
    Numbers received;
    for (int peer = 0; peer < 3; ++peer) received.push_back(values_of(peer, 3)[size_t(me.rank)]);
    me.expect(y, received);
    EXPECT_EQ(table.GroupStart(), kNcclSuccess);
    EXPECT_EQ(table.GroupEnd(), kNcclSuccess) << "of nothing";
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclDoubles, AGroupThatCannotBeLaunchesNothing) {
  each(1, [&](Rank& me) {
    float* x = me.floats({1, 1});
    EXPECT_EQ(table.GroupStart(), kNcclSuccess);
    EXPECT_EQ(me.all_reduce(x, x, 2), kNcclSuccess);
    EXPECT_EQ(table.AllReduce(x, x, 1, kFloat32, kSum, me.comm, nullptr), kInvalidUsage);
    EXPECT_EQ(me.all_reduce(x + 1, x + 1, 1), kInvalidUsage);
    EXPECT_EQ(table.GroupEnd(), kInvalidUsage);
    EXPECT_EQ(table.GroupEnd(), kInvalidUsage) << "there is none any more";
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), (Texts{"NCCL's AllReduce is called for another communicator or stream than its group: not "
                                  "modelled",
                                  "NCCL's AllReduce is called with memory that another call of its group uses",
                                  "NCCL's GroupEnd is called outside of a group"}));
}

TEST_F(NcclDoubles, SendAndRecvNeedOnlyTheTwo) {
  each(3, [&](Rank& me) {
    float *x = me.floats({double(me.rank)}), *y = me.floats({0});
    for (int i = 0; i < 3; ++i) {
      if (me.rank == 0) me.check(table.Send(x, 1, kFloat32, 2, me.comm, me.stream));
      if (me.rank == 2) me.check(table.Recv(y, 1, kFloat32, 0, me.comm, me.stream));
      me.check(me.all_reduce(x, x, 1));
    }
    me.expect(x, {27});
    if (me.rank == 2) me.expect(y, {9});
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), Texts{});
}

TEST_F(NcclDoubles, RanksThatDisagreeAreFound) {
  each(2, [&](Rank& me) {
    float *x = me.floats({1, 1}), *y = me.floats({7, 7});
    me.check(me.all_reduce(x, y, me.rank == 0 ? 1 : 2));
    if (me.rank == 0) me.check(table.Reduce(x, y, 1, kFloat32, kSum, 1, me.comm, me.stream));
    else me.check(table.Broadcast(x, y, 1, kFloat32, 1, me.comm, me.stream));
    if (me.rank == 0) me.check(table.Send(x, 1, kFloat32, 1, me.comm, me.stream));
    else me.check(table.Recv(y, 2, kFloat32, 0, me.comm, me.stream));
    me.expect(y, {7, 7});
    me.leave();
  });
  EXPECT_EQ(cuda.faults(),
            (Texts{"ranks 0 and 1 of communicator 1 disagree: AllReduce of 1 float32 (sum), but AllReduce of 2 float32 "
                   "(sum)",
                   "ranks 0 and 1 of communicator 1 disagree: Reduce of 1 float32 at rank 1 (sum), but Broadcast of 1 "
                   "float32 from rank 1",
                   "ranks 0 and 1 of communicator 1 disagree: Send of 1 float32 to rank 1, but Recv of 2 float32 from "
                   "rank 0"}));
}

TEST_F(NcclDoubles, MemoryWithoutOrderIsFound) {
  each(1, [&](Rank& me) {
    float *x = me.floats({1}), *y = me.floats({1});
    me.read(x, 0);  // waits
    cuda.fill(0, nullptr, x, 1, 2);
    me.check(me.all_reduce(x, y, 1));
    cuda.fill(0, nullptr, y, 1, 3);
    me.leave();
  });
  EXPECT_EQ(cuda.faults(), (Texts{"a kernel of NCCL on stream 1 of device 0 reads 4 bytes that a kernel on the default "
                                  "stream writes without order",
                                  "a kernel on the default stream of device 0 writes 4 bytes that a kernel of NCCL on "
                                  "stream 1 writes without order"}));
}

TEST_F(NcclDoubles, MemoryIsOfTheDevice) {
  each(1, [&](Rank& me) {
    auto* other = static_cast<float*>(cuda.allocate(1, sizeof(float)));
    EXPECT_EQ(me.done(me.all_reduce(other, other, 1)), kCudaError);
    me.abort();
  });
  EXPECT_EQ(cuda.faults(), Texts{"a kernel of NCCL on stream 1 of device 0 uses 4 bytes that are neither the device's "
                                 "nor pinned"});
}

}  // namespace
}  // namespace lightcc
