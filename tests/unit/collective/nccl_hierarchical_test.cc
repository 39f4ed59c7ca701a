// 2D all-reduce by NCCL: on nodes of several sizes, with vectors of every length around what members and chunks divide.
#include "collective/nccl_hierarchical.h"

#include "base/clock.h"
#include "unit/nccl_double_ranks.h"

namespace lightcc {
namespace {

using namespace test;

class NcclHierarchical : public NcclDoubles {
 protected:
  NcclHierarchical() { nccl.set_kernels(2); }
  ~NcclHierarchical() override { EXPECT_EQ(nccl.leaks(), 0u); }

  // Ranks of nodes that lie side by side, with a backend that cuts into small chunks.
  void each_of(int nodes, int members, const std::function<void(Rank&, NcclHierarchicalBackend&)>& body) {
    std::vector<NcclUniqueId> ids;  // of all, of each node, of each place
    for (int i = 0; i < 1 + nodes + members; ++i) ids.push_back(unique_id());
    each_alone(nodes * members, [&](Rank& me) {
      const int node = me.rank / members, place = me.rank % members;
      const auto connected = [&](int size, int member, const NcclUniqueId& id) {
        auto one = std::make_unique<NcclCommunicator>(CudaDouble::functions(), table, me.device, size, member, id);
        while (!one->ready()) std::this_thread::yield();
        return one;
      };
      NcclHierarchicalBackend backend({.least_bytes = 1, .chunk_bytes = 64});
      NcclCommunicators communicators;
      communicators.all.push_back(connected(me.ranks, me.rank, ids[0]));
      communicators.local = connected(members, place, ids[size_t(1 + node)]);
      communicators.cross = connected(nodes, node, ids[size_t(1 + nodes + place)]);
      backend.connect(CudaDouble::functions(), communicators, me.stream);
      body(me, backend);
      communicators.end(now_ns() + 10'000'000'000).wait();
    });
  }

  static Collective allreduce(const Rank& me, DType dtype, ReduceOp op, const void* input, void* output, size_t count) {
    Collective c{};
    c.kind = Kind::allreduce;
    c.device = DeviceKind::cuda;
    c.index = me.rank;
    c.size = me.ranks;
    c.dtype = dtype;
    c.op = op;
    c.input = input;
    c.output = output;
    c.count = int64_t(count);
    return c;
  }
  static void run(NcclHierarchicalBackend& backend, const Collective& c) {
    ASSERT_TRUE(backend.accepts(c));
    const auto work = backend.start(c, nullptr);
    while (!work->done()) work->step();
  }
  // Each element another one, small enough for every dtype.
  static Numbers values(int rank, size_t count) {
    Numbers values;
    for (size_t i = 0; i < count; ++i) values.push_back(double((i * 7 + size_t(rank)) % 5));
    return values;
  }
  static Numbers sums(int ranks, size_t count) {
    Numbers sums(count);
    for (int rank = 0; rank < ranks; ++rank) {
      const Numbers one = values(rank, count);
      for (size_t i = 0; i < count; ++i) sums[i] += one[i];
    }
    return sums;
  }
};

TEST_F(NcclHierarchical, SumsOfEveryLength) {
  for (const auto& [nodes, members] : {std::pair(2, 2), {3, 2}, {2, 4}}) {
    each_of(nodes, members, [&](Rank& me, NcclHierarchicalBackend& backend) {
      for (const size_t count : {1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 66, 101}) {
        const float* input = me.floats(values(me.rank, count));
        float* output = me.floats(Numbers(count));
        run(backend, allreduce(me, DType::float32, ReduceOp::sum, input, output, count));
        me.expect(output, sums(me.ranks, count));
        me.expect(input, values(me.rank, count));
      }
    });
  }
}

TEST_F(NcclHierarchical, AllDtypesAndOperationsInPlace) {
  constexpr size_t kCount = 67;
  each_of(2, 2, [&](Rank& me, NcclHierarchicalBackend& backend) {
    for (const DType dtype : {DType::int8, DType::uint8, DType::int32, DType::int64, DType::uint32, DType::uint64,
                              DType::float16, DType::float32, DType::float64, DType::bfloat16}) {
      void* memory = me.memory(dtype, values(me.rank, kCount));
      run(backend, allreduce(me, dtype, ReduceOp::sum, memory, memory, kCount));
      me.expect(memory, dtype, sums(me.ranks, kCount), "sum");
      const Collective max = allreduce(me, dtype, ReduceOp::max, memory, memory, kCount);
      if (is_floating(dtype)) {
        EXPECT_FALSE(backend.accepts(max)) << "NCCL's maximum hides a NaN";
        continue;
      }
      run(backend, max);
      me.expect(memory, dtype, sums(me.ranks, kCount), "max of equals");
    }
  });
}

TEST_F(NcclHierarchical, FactorsBeforeAndAfter) {
  constexpr size_t kCount = 35;
  each_of(2, 2, [&](Rank& me, NcclHierarchicalBackend& backend) {
    const float* input = me.floats(values(me.rank, kCount));
    float* output = me.floats(Numbers(kCount));
    Collective c = allreduce(me, DType::float32, ReduceOp::sum, input, output, kCount);
    c.pre = 2;
    c.post = 0.25;
    run(backend, c);
    Numbers expected = sums(me.ranks, kCount);
    for (double& value : expected) value /= 2;
    me.expect(output, expected);
  });
}

TEST_F(NcclHierarchical, ChunksFollowEachOtherInOrderOnly) {
  cuda.ignore_order(true);
  each_of(2, 2, [&](Rank& me, NcclHierarchicalBackend& backend) {
    float* memory = me.floats(values(me.rank, 66));
    run(backend, allreduce(me, DType::float32, ReduceOp::sum, memory, memory, 66));
    cuda.synchronize(me.device, me.stream);
  });
  EXPECT_NE(cuda.faults(), Texts{}) << "the double found nothing";
}

TEST_F(NcclHierarchical, WhatItDoesNotTake) {
  NcclHierarchicalBackend alone({});
  each_of(2, 2, [&](Rank& me, NcclHierarchicalBackend& backend) {
    Collective c = allreduce(me, DType::float32, ReduceOp::sum, nullptr, nullptr, 100);
    EXPECT_TRUE(backend.accepts(c));
    EXPECT_FALSE(alone.accepts(c)) << "it is not connected";
    c.count = 0;
    EXPECT_FALSE(backend.accepts(c));
    c.count = 100;
    c.op = ReduceOp::adasum;
    EXPECT_FALSE(backend.accepts(c));
    c.op = ReduceOp::sum;
    c.dtype = DType::boolean;
    EXPECT_FALSE(backend.accepts(c)) << "NCCL has no such dtype";
    c.dtype = DType::float32;
    c.codec.kind = CodecKind::topk;
    EXPECT_FALSE(backend.accepts(c));
    c = {};
    c.kind = Kind::broadcast;
    c.count = 100;
    EXPECT_FALSE(backend.accepts(c));
  });
}

}  // namespace
}  // namespace lightcc
