// How a batch runs: which collectives a backend is given, what is copied before and after, where results end up. The
// backend here writes down what it is asked for, and doubles what it is given.
#include "engine/run/batch_execution.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

namespace lightcc {
namespace {

using Values = std::vector<float>;

class RecordingBackend : public Backend {
 public:
  explicit RecordingBackend(const char* name = "recording") : name_(name) {}
  std::vector<Collective> started;

  const char* name() const override { return name_; }
  bool accepts(const Collective&) const override { return true; }
  std::unique_ptr<Work> start(const Collective& collective, const Algorithm*) override {
    started.push_back(collective);
    return std::make_unique<Doubling>(collective);
  }

 private:
  const char* const name_;
  struct Doubling : Work {
    explicit Doubling(Collective c) : collective(std::move(c)) {}
    bool step() override {
      if (!std::exchange(begun, true)) return true;
      finished = true;
      if (collective.kind != Kind::allreduce || collective.dtype != DType::float32) return true;
      const Values in(static_cast<const float*>(collective.input),
                      static_cast<const float*>(collective.input) + collective.count);
      for (size_t i = 0; i < in.size(); ++i) static_cast<float*>(collective.output)[i] = 2 * in[i];
      return true;
    }
    bool done() const override { return finished; }
    int waiting_for() const override { return 1; }
    Collective collective;
    bool begun = false, finished = false;
  };
};

constexpr Rule kRules[] = {{Kind::allreduce, 0, 0, 0, "recording", nullptr},
                           {Kind::allgather, 0, 0, 0, "recording", nullptr},
                           {Kind::broadcast, 0, 0, 0, "recording", nullptr},
                           {Kind::alltoall, 0, 0, 0, "recording", nullptr},
                           {Kind::reducescatter, 0, 0, 0, "recording", nullptr}};

struct Tensor {
  DType dtype;
  Shape shape;
  const void* input;
  void* output;
};
template <class Input, class Output> Tensor tensor(const Input& input, Output& output) {
  return {DType::float32, {int64_t(input.size())}, input.data(), output.data()};
}

// Member 1 of three, on one host.
class Batches : public testing::Test {
 protected:
  static BatchItem item(Kind kind, std::vector<Tensor> tensors, ReduceOp op = ReduceOp::sum) {
    auto request = std::make_shared<Request>();
    request->key = std::string(name_of(kind)) + ".x";
    request->what.kind = kind;
    request->what.op = op;
    for (const Tensor& one : tensors) {
      request->what.tensors.push_back({one.dtype, one.shape});
      request->inputs.push_back(one.input);
      request->outputs.push_back(one.output);
    }
    return {std::move(request), {}};
  }
  static BatchItem allreduce(std::vector<Tensor> tensors, ReduceOp op = ReduceOp::sum) {
    return item(Kind::allreduce, std::move(tensors), op);
  }
  std::unique_ptr<BatchExecution> begin(std::vector<BatchItem> items) {
    return std::make_unique<BatchExecution>(std::move(items), group, buffer, outputs, counters, tracing, selector);
  }
  void run(std::vector<BatchItem> items) {
    auto execution = begin(std::move(items));
    for (int steps = 0; !execution->done(); ++steps) {
      ASSERT_LT(steps, 1000);
      ASSERT_TRUE(execution->step());
    }
    EXPECT_FALSE(execution->step()) << "after the end";
  }
  // So many floats in memory that ranks share, `value` each.
  float* shared(size_t count, float value) {
    auto* data = reinterpret_cast<float*>(arena->allocate(count * sizeof(float)));
    std::fill(data, data + count, value);
    return data;
  }
  uint64_t counted(Counters::Name name) const { return counters.values[name]; }

  const Group group{0, {0, 1, 2}, 1, Topology::one_host(3)};
  const std::shared_ptr<Arena> arena = Arena::create(4096);
  FusionBuffer buffer{arena};
  const std::shared_ptr<OutputPool> outputs = std::make_shared<OutputPool>(size_t(64) << 20, uint64_t(1) << 50);
  Counters counters;
  Timeline timeline;
  Tracing tracing{timeline};
  RecordingBackend backend;
  Backend* backends[1] = {&backend};
  const Selector selector{backends, 1, "", kRules};
};

// ---- fused or not

TEST_F(Batches, OneTensorRunsWhereItIs) {
  const Values in(5, 1);
  Values out(5);
  run({allreduce({tensor(in, out)})});
  ASSERT_EQ(backend.started.size(), 1u);
  const Collective& c = backend.started[0];
  EXPECT_EQ(c.input, in.data());
  EXPECT_EQ(c.output, out.data());
  EXPECT_EQ(c.count, 5);
  EXPECT_EQ(c.index, 1);
  EXPECT_EQ(c.size, 3);
  EXPECT_EQ(out, Values(5, 2));
  EXPECT_EQ(counted(Counters::fused_batches), 0u);
  EXPECT_EQ(counted(Counters::payload_bytes), 20u);
}

TEST_F(Batches, TensorsSideBySideInSharedMemoryRunInPlace) {
  float* data = shared(32, 1);  // the second begins at the second line
  run({allreduce({{DType::float32, {10}, data, data}}), allreduce({{DType::float32, {4}, data + 16, data + 16}})});
  ASSERT_EQ(backend.started.size(), 1u);
  EXPECT_EQ(backend.started[0].input, data);
  EXPECT_EQ(backend.started[0].output, data);
  EXPECT_EQ(backend.started[0].count, 20);
  EXPECT_EQ(Values(data, data + 20), Values(20, 2)) << "what lies between them is worked on too";
  EXPECT_EQ(counted(Counters::fused_batches), 1u);
  EXPECT_EQ(counted(Counters::fused_requests), 2u);
  arena->release(reinterpret_cast<std::byte*>(data));
}

TEST_F(Batches, PrivateTensorsAreCopiedTogetherAndBack) {
  const Values a(10, 1), b(4, 3);
  Values a_out(10), b_out(4);
  run({allreduce({tensor(a, a_out)}), allreduce({tensor(b, b_out)})});
  ASSERT_EQ(backend.started.size(), 1u);
  const Collective& c = backend.started[0];
  EXPECT_EQ(c.input, c.output);
  EXPECT_GE(arena->offset_of(c.input, size_t(c.count) * sizeof(float)), 0) << "the fusion buffer is shared";
  EXPECT_EQ(c.count, 20) << "the second begins at the second line";
  EXPECT_EQ(a_out, Values(10, 2));
  EXPECT_EQ(b_out, Values(4, 6));
  EXPECT_EQ(a, Values(10, 1));
}

TEST_F(Batches, AGroupOfSeveralDtypesIsACollectiveForEach) {
  Values a(3, 1), b(3, 2);
  std::vector<int32_t> whole(3, 7);
  run({allreduce({tensor(a, a), {DType::int32, {3}, whole.data(), whole.data()}, tensor(b, b)})});
  ASSERT_EQ(backend.started.size(), 2u);
  EXPECT_EQ(backend.started[0].dtype, DType::int32);
  EXPECT_EQ(backend.started[0].input, whole.data()) << "alone, so it is not copied";
  EXPECT_EQ(backend.started[1].dtype, DType::float32);
  EXPECT_EQ(backend.started[1].count, 19);
  EXPECT_EQ(a, Values(3, 2));
  EXPECT_EQ(b, Values(3, 4));
}

TEST_F(Batches, ALargeCopyTakesSeveralSteps) {
  Values a(150'000, 1), b(150'000, 1);
  auto execution = begin({allreduce({tensor(a, a), tensor(b, b)})});
  int steps = 0;
  for (; backend.started.empty(); ++steps) ASSERT_TRUE(execution->step());
  EXPECT_GE(steps, 4) << "1.2 MB before the collective starts";
  while (!execution->done()) execution->step();
  EXPECT_EQ(a, Values(150'000, 2));
  EXPECT_EQ(b, Values(150'000, 2));
}

TEST_F(Batches, WhatHasNoElementsRunsNoCollective) {
  Values none;
  auto execution = begin({allreduce({tensor(none, none)})});
  EXPECT_TRUE(execution->done());
  EXPECT_FALSE(execution->step());
  EXPECT_EQ(backend.started.size(), 0u);
}

TEST_F(Batches, ABarrierRunsNoCollective) {
  EXPECT_TRUE(begin({item(Kind::barrier, {})})->done());
  EXPECT_EQ(counted(Counters::batches), 1u);
}

TEST_F(Batches, NamesTheMemberThatItWaitsFor) {
  Values a(3, 1);
  auto execution = begin({allreduce({tensor(a, a)})});
  execution->step();
  EXPECT_EQ(execution->waiting_for(), 1);
}

TEST_F(Batches, WhatIsCopiedIsCopiedBeforeACollectiveMayStart) {
  Values a(3, 1), b(4, 2);
  auto execution = begin({allreduce({tensor(a, a)}), allreduce({tensor(b, b)})});
  EXPECT_TRUE(execution->step(false));
  EXPECT_FALSE(execution->step(false)) << "nothing is left to do but to start";
  EXPECT_FALSE(execution->all_started());
  EXPECT_EQ(backend.started.size(), 0u);
  a.assign(3, 9);  // it lies in the buffer already
  EXPECT_TRUE(execution->step());
  EXPECT_TRUE(execution->all_started());
  EXPECT_FALSE(execution->done());
  while (!execution->done()) execution->step();
  EXPECT_EQ(a, Values(3, 2));
  EXPECT_EQ(b, Values(4, 4));
}

TEST_F(Batches, AllIsStartedWithTheLastCollective) {
  Values a(3, 1);
  std::vector<double> b(3, 1);
  auto execution = begin({allreduce({tensor(a, a), {DType::float64, {3}, b.data(), b.data()}})});
  execution->step();
  ASSERT_EQ(backend.started.size(), 1u);
  EXPECT_FALSE(execution->all_started());
  for (int steps = 0; backend.started.size() < 2 && steps < 10; ++steps) execution->step();
  EXPECT_TRUE(execution->all_started());
  EXPECT_FALSE(execution->done());
}

// ---- op and factors

struct FactorsRow {
  const char* name;
  DType dtype;
  ReduceOp op;
  double pre, post;
  int absent;
  ReduceOp runs;
  double runs_pre, runs_post;
};

TEST_F(Batches, OpAndFactorsAreWhatTheBackendIsToCompute) {
  constexpr DType kFloat = DType::float32;
  const double third = 1.0 / 3;
  const FactorsRow rows[] = {
      {"sum", kFloat, ReduceOp::sum, 2, 5, 0, ReduceOp::sum, 2, 5},
      {"average", kFloat, ReduceOp::average, 2, 5, 0, ReduceOp::sum, 2, 5 * third},
      {"average of integers", DType::int32, ReduceOp::average, 1, 1, 0, ReduceOp::sum, 1, std::nextafter(third, 1)},
      {"average without one", kFloat, ReduceOp::average, 1, 1, 1, ReduceOp::sum, 1, third},
      {"max", kFloat, ReduceOp::max, 1, 1, 0, ReduceOp::max, 1, 1},
      {"product", kFloat, ReduceOp::product, 3, 5, 0, ReduceOp::product, 3, 5},
      {"product without one", kFloat, ReduceOp::product, 3, 5, 1, ReduceOp::product, 1, 45},
      {"product without two", kFloat, ReduceOp::product, 3, 5, 2, ReduceOp::product, 1, 15},
  };
  for (Kind kind : {Kind::allreduce, Kind::reducescatter})
    for (const FactorsRow& row : rows) {
      SCOPED_TRACE(std::string(name_of(kind)) + ": " + row.name);
      Values a(3, 1);
      BatchItem one = item(kind, {{row.dtype, {3}, a.data(), a.data()}}, row.op);
      one.request->what.pre = row.pre;
      one.request->what.post = row.post;
      one.absent = row.absent;
      run({std::move(one)});
      const Collective& c = backend.started.back();
      EXPECT_EQ(c.kind, kind);
      EXPECT_EQ(c.op, row.runs);
      EXPECT_EQ(c.pre, row.runs_pre);
      EXPECT_EQ(c.post, row.runs_post);
    }
}

TEST_F(Batches, AdasumKnowsWhereEachTensorLies) {
  Values a(10, 1), b(4, 1);
  run({allreduce({tensor(a, a), tensor(b, b)}, ReduceOp::adasum)});
  const auto& places = backend.started.at(0).tensors;
  ASSERT_EQ(places.size(), 2u);
  EXPECT_EQ(places[0].offset, 0);
  EXPECT_EQ(places[0].count, 10);
  EXPECT_EQ(places[1].offset, 16);
  EXPECT_EQ(places[1].count, 4);
  run({allreduce({tensor(a, a), tensor(b, b)})});
  EXPECT_TRUE(backend.started.at(1).tensors.empty()) << "no other op asks";
}

// ---- what is not reduced in place

TEST_F(Batches, AllgatherHasRoomForTheRowsOfAll) {
  const Values in(4, 1);
  BatchItem one = item(Kind::allgather, {{DType::float32, {2, 2}, in.data(), nullptr}});
  one.rows = {{1, 2, 4}};
  const RequestPtr request = one.request;
  run({std::move(one)});
  const Collective& c = backend.started.at(0);
  EXPECT_EQ(c.counts, (std::vector<int64_t>{2, 4, 8}));
  EXPECT_EQ(c.input, in.data());
  EXPECT_EQ(request->results[0].shape, (Shape{7, 2}));
  EXPECT_EQ(c.output, request->results[0].data);
}

TEST_F(Batches, AlltoallTellsWhomTheRowsAreFrom) {
  const Values in(12, 1);
  BatchItem one = item(Kind::alltoall, {{DType::float32, {6, 2}, in.data(), nullptr}});
  one.rows = {{0, 1, 2, 1, 2, 3, 0, 4, 5}};  // from member i to member j at 3i + j
  const RequestPtr request = one.request;
  run({std::move(one)});
  const Collective& c = backend.started.at(0);
  EXPECT_EQ(c.send, (std::vector<int64_t>{2, 4, 6}));
  EXPECT_EQ(c.counts, (std::vector<int64_t>{2, 4, 8}));
  EXPECT_EQ(request->results[0].rows_from, (std::vector<int32_t>{1, 2, 4}));
  EXPECT_EQ(request->results[0].shape, (Shape{7, 2}));
}

TEST_F(Batches, ReducescatterGivesTheFirstMembersOneRowMore) {
  const Values in(10, 1);
  BatchItem one = item(Kind::reducescatter, {{DType::float32, {5, 2}, in.data(), nullptr}}, ReduceOp::average);
  const RequestPtr request = one.request;
  run({std::move(one)});
  const Collective& c = backend.started.at(0);
  EXPECT_EQ(c.counts, (std::vector<int64_t>{4, 4, 2}));
  EXPECT_EQ(c.op, ReduceOp::sum);
  EXPECT_EQ(c.post, 1.0 / 3);
  EXPECT_EQ(request->results[0].shape, (Shape{2, 2}));
}

TEST_F(Batches, BroadcastCopiesTheRootsInputIntoItsOutputFirst) {
  for (int root : {0, 1}) {
    const Values in(3, 5);
    Values out(3, 0);
    BatchItem one = item(Kind::broadcast, {tensor(in, out)});
    one.request->what.root = root;
    run({std::move(one)});
    EXPECT_EQ(backend.started.back().root, root);
    EXPECT_EQ(backend.started.back().output, out.data());
    EXPECT_EQ(out, Values(3, root == 1 ? 5 : 0));
  }
}

TEST_F(Batches, AnOutputThatAllKnowToBeEmptyIsAllocatedAllTheSame) {
  BatchItem one = item(Kind::allgather, {{DType::float32, {0, 2}, nullptr, nullptr}});
  one.rows = {{0, 0, 0}};
  const RequestPtr request = one.request;
  EXPECT_TRUE(begin({std::move(one)})->done());
  EXPECT_EQ(request->results[0].shape, (Shape{0, 2}));
  EXPECT_NE(request->results[0].data, nullptr);
}

TEST_F(Batches, LargeOutputsComeFromThePool) {
  const int64_t count = int64_t(OutputPool::kLeastBytes / sizeof(float));
  const Values in(static_cast<size_t>(count), 1);
  BatchItem one = item(Kind::allgather, {{DType::float32, {count}, in.data(), nullptr}});
  one.rows = {{0, count, 0}};
  const RequestPtr request = one.request;
  run({std::move(one)});
  EXPECT_EQ(request->results[0].own.get_deleter().pool, outputs);
  request->results.clear();
  EXPECT_GE(outputs->kept_bytes(), OutputPool::kLeastBytes);
}

struct Allocation {
  Shape shape;
  Values memory;
};
void* allocate(void* context, int, const int64_t* shape, int ndim) {
  auto* allocation = static_cast<Allocation*>(context);
  allocation->shape.assign(shape, shape + ndim);
  return allocation->memory.data();
}

TEST_F(Batches, ACallerMayAllocateItsOutputs) {
  const Values in(2, 1);
  for (bool gives : {true, false}) {
    Allocation allocation{{}, Values(gives ? 6 : 0)};
    BatchItem one = item(Kind::allgather, {{DType::float32, {2}, in.data(), nullptr}});
    one.rows = {{2, 2, 2}};
    one.request->callbacks.allocate = allocate;
    one.request->callbacks.context = &allocation;
    const RequestPtr request = one.request;
    if (gives) {
      run({std::move(one)});
      EXPECT_EQ(backend.started.back().output, allocation.memory.data());
      EXPECT_EQ(request->results[0].own, nullptr);
    } else {
      EXPECT_THROW(begin({std::move(one)}), Error) << "it has no memory";
    }
    EXPECT_EQ(allocation.shape, Shape{6});
  }
}

TEST_F(Batches, AllReducesOfTheSizesThatTheBatchNamesTakeTheSecondChoice) {
  RecordingBackend other("other");
  constexpr Rule kBoth[] = {{Kind::allreduce, 0, 0, 0, "recording", nullptr},
                            {Kind::allreduce, 0, 0, 0, "other", nullptr}};
  Backend* const both[] = {&backend, &other};
  const Selector choices(both, 1, "", kBoth);
  for (const AutotuneChoices second : {0, 1 << 4, 1 << 5}) {
    Values data(4, 1);
    std::vector<BatchItem> items{allreduce({tensor(data, data)})};
    items[0].second = second;
    BatchExecution execution(std::move(items), group, buffer, outputs, counters, tracing, choices);
    ASSERT_NE(execution.only_collective(), nullptr);
    EXPECT_EQ(execution.only_collective()->count, 4);
    while (!execution.done()) execution.step();
  }
  EXPECT_EQ(backend.started.size(), 2u);
  EXPECT_EQ(other.started.size(), 1u) << "four floats are of class 4";
}

}  // namespace
}  // namespace lightcc
