// Schedules run over real Links, each rank a thread, with links that are small, refuse, delay and break.
#include "collective/execution.h"

#include <gtest/gtest.h>

#include "collective/algorithms.h"
#include "unit/simulated.h"

namespace lightcc {
namespace {

using namespace test;

std::shared_ptr<const Schedule> shared_plan(const Algorithm& algorithm, const Collective& c, const Hosts& hosts) {
  return std::make_shared<const Schedule>(plan(algorithm, c, hosts));
}
std::shared_ptr<const Schedule> shared_plan(const Algorithm& algorithm, const Collective& c) {
  return shared_plan(algorithm, c, one_host(c.size));
}

struct Case {
  const Algorithm* algorithm;
  Problem problem;
  bool in_place;
  Hosts hosts;
};
std::string text_of(const Case& c) {
  const Problem& p = c.problem;
  return std::string(name_of(p.kind)) + "/" + c.algorithm->name + " size " + std::to_string(p.size) + " count " +
         std::to_string(p.count) + " " + name_of(p.dtype) + " " + name_of(p.op) + " root " + std::to_string(p.root) +
         " seed " + std::to_string(p.seed) + (c.in_place ? " in place" : "") + " on " + test::text_of(c.hosts);
}

std::vector<Case> cases_of(int size, uint64_t seed) {
  std::vector<Case> cases;
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.adasum) continue;  // adasum_test.cc
    for (DType dtype : {DType::int32, DType::float32, DType::float16})
      for (int64_t count : {0, 1, 5, 301}) {
        Problem problem(algorithm.kind, size, count, ++seed);
        problem.dtype = dtype;
        problem.root = int(seed % uint64_t(size));
        // Whole numbers truncate; for the others the answer has to stay a whole number.
        const bool fractions = dtype == DType::int32 || problem.op != ReduceOp::product;
        if (seed % 3 == 0 && fractions) problem.pre = 0.5;
        if (seed % 2 == 0) problem.post = dtype == DType::int32 ? 1.5 : 2;
        const auto hosts = placements(size, seed);
        cases.push_back({&algorithm, problem, algorithm.kind == Kind::allreduce && seed % 5 < 2,
                         hosts[size_t(seed % hosts.size())]});
      }
  }
  return cases;
}

// All cases one after the other over the same links; no rank waits for the others in between.
void run_cases(int size, const LoopFaults& faults) {
  SCOPED_TRACE(testing::Message() << size << " ranks, records of " << faults.record_bytes << ", seed " << faults.seed);
  const std::vector<Case> cases = cases_of(size, faults.seed);
  std::vector<std::string> wrong(static_cast<size_t>(size));
  LoopNetwork transport(size, faults);
  const auto thrown = run_ranks(transport, size, [&](int rank) {
    const std::vector<Link*> links = transport.links(rank);
    for (const Case& one : cases) {
      const Problem& problem = one.problem;
      const auto input = encode(problem.dtype, problem.input(rank));
      auto output = one.in_place ? input : encode(problem.dtype, problem.output(rank));
      Collective c = problem.of(rank);
      c.input = one.in_place ? output.data() : input.data();
      c.output = output.data();
      Execution execution(shared_plan(*one.algorithm, c, one.hosts), c, links);
      try {
        drive(execution);
      } catch (const Error& error) {
        throw Error(error.code(), text_of(one) + ": " + error.what());
      }
      if (output != encode(problem.dtype, problem.expected(rank))) {
        wrong[rank] = text_of(one);
        return;
      }
    }
  });
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(test::text_of(thrown[rank]), "") << "rank " << rank;
    EXPECT_EQ(wrong[rank], "") << "rank " << rank << " has a wrong result";
  }
}

TEST(Execution, EveryAlgorithmOverGentleLinks) {
  for (int size = 1; size <= 9 && !HasFailure(); ++size) run_cases(size, {.seed = run_seed() + uint64_t(size)});
}
TEST(Execution, EveryAlgorithmOverFaultyLinks) {
  for (int size = 1; size <= 9 && !HasFailure(); ++size)
    run_cases(size, {61, 1, 0.2, 0.3, run_seed() + uint64_t(size)});
}

// Reductions in a different order at each rank would leave different bits.
void check_equal_bits(const char* name, int size, ReduceOp op) {
  constexpr size_t kCount = 1001;
  SCOPED_TRACE(testing::Message() << name << " " << name_of(op) << " among " << size);
  std::vector<std::vector<float>> outputs(static_cast<size_t>(size), std::vector<float>(kCount));
  LoopNetwork transport(size);
  const auto thrown = run_ranks(transport, size, [&](int rank) {
    std::mt19937_64 random(run_seed() + uint64_t(rank));
    for (float& value : outputs[rank]) value = std::normal_distribution<float>()(random);
    outputs[rank][0] = rank % 2 ? 0.0f : -0.0f;  // of these, min and max may return either
    Collective c = Problem(Kind::allreduce, size, kCount, 1).of(rank);
    c.dtype = DType::float32;
    c.op = op;
    c.post = 1.0 / size;
    c.input = c.output = outputs[rank].data();
    const std::vector<Link*> links = transport.links(rank);
    Execution execution(shared_plan(*find_algorithm(Kind::allreduce, name), c), c, links);
    drive(execution);
  });
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_EQ(test::text_of(thrown[rank]), "");
    EXPECT_EQ(std::memcmp(outputs[0].data(), outputs[rank].data(), kCount * sizeof(float)), 0) << "rank " << rank;
  }
}

TEST(Execution, AllRanksEndWithEqualBits) {
  for (const char* name : {"ring", "recursive_doubling", "halving_doubling"})
    for (int size : {2, 3, 5, 8})
      for (ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max}) check_equal_bits(name, size, op);
}

TEST(Execution, NeverBlocksAndSaysWhomItWaitsFor) {
  LoopNetwork transport(3, {.capacity = 1});
  const std::vector<Link*> links = transport.links(0);
  std::vector<int32_t> data(10, 1);
  Collective c = Problem(Kind::broadcast, 3, 10, 1).of(0);
  c.root = 2;
  c.dtype = DType::int32;
  c.output = data.data();
  Execution waits(shared_plan(*find_algorithm(Kind::broadcast, "binomial"), c), c, links);
  EXPECT_FALSE(waits.step());
  EXPECT_FALSE(waits.done());
  EXPECT_EQ(waits.waiting_for(), 2);
  ASSERT_NE(transport.link(2, 0)->reserve(40), nullptr);
  transport.link(2, 0)->commit(40);
  EXPECT_TRUE(waits.step());
  EXPECT_TRUE(waits.done());
  EXPECT_FALSE(waits.step());
  EXPECT_EQ(waits.waiting_for(), -1);
}

TEST(Execution, OneStepIsABoundedPieceOfWork) {
  constexpr int64_t kBytes = 10 << 20;
  std::vector<uint8_t> input(kBytes, 3), output(kBytes);
  Collective c = Problem(Kind::allreduce, 1, kBytes, 1).of(0);
  c.dtype = DType::uint8;
  c.input = input.data();
  c.output = output.data();
  const std::vector<Link*> links{nullptr};
  Execution execution(shared_plan(*find_algorithm(Kind::allreduce, "ring"), c), c, links);
  int steps = 0;
  while (!execution.done()) {
    ASSERT_TRUE(execution.step());
    ++steps;
  }
  EXPECT_GE(steps, kBytes / (512 << 10));
  EXPECT_LE(steps, kBytes / (128 << 10));
  EXPECT_EQ(output, input);
}

TEST(Execution, NothingToDoIsDoneAtOnce) {
  LoopNetwork transport(4);
  const std::vector<Link*> links = transport.links(1);
  const Collective c = Problem(Kind::allreduce, 4, 0, 1).of(1);
  EXPECT_TRUE(Execution(shared_plan(*find_algorithm(Kind::allreduce, "ring"), c), c, links).done());
}

// Steps in one direction to one peer keep their order even if a later one could go sooner, also around an empty one.
TEST(Execution, StepsToOnePeerKeepTheirOrder) {
  LoopNetwork transport(2, {.record_bytes = 8, .capacity = 1});
  const std::vector<Link*> links = transport.links(0);
  int64_t input[] = {1, 2, 3}, output[3] = {};
  Collective c = Problem(Kind::allreduce, 2, 3, 1).of(0);
  c.input = input;
  c.output = output;
  const auto schedule = std::make_shared<const Schedule>(
      Schedule{{Step::send(1, {Memory::input, 1}, 2), Step::send(1, {Memory::input, 0}, 0),
                Step::send(1, {Memory::input, 0}, 1)}});
  Execution execution(schedule, c, links);
  for (int64_t expected : {2, 3, 1}) {
    EXPECT_TRUE(execution.step());
    EXPECT_FALSE(execution.step()) << "the link is full";
    EXPECT_EQ(*reinterpret_cast<const int64_t*>(transport.link(1, 0)->peek(8)), expected);
    transport.link(1, 0)->consume(8);
  }
  EXPECT_TRUE(execution.done());
}

TEST(Execution, ARecordTooSmallForAnElementIsAnError) {
  LoopNetwork transport(2, {.record_bytes = 7});
  const std::vector<Link*> links = transport.links(0);
  int64_t data[] = {1};
  Collective c = Problem(Kind::broadcast, 2, 1, 1).of(0);
  c.output = data;
  Execution execution(shared_plan(*find_algorithm(Kind::broadcast, "binomial"), c), c, links);
  EXPECT_THROW(execution.step(), Error);
}

// A link breaks half-way: both of its ranks say so, nobody hangs, and whoever ended did so with a right result.
TEST(Execution, ACutLinkRaisesAndNobodyHangs) {
  for (const Algorithm& algorithm : algorithms())
    for (int64_t records : {0, 1, 3}) {
      if (algorithm.adasum) continue;
      constexpr int kSize = 4;
      SCOPED_TRACE(testing::Message() << name_of(algorithm.kind) << "/" << algorithm.name << " cut after " << records);
      Problem problem(algorithm.kind, kSize, 400, 3);
      problem.counts.assign(kSize, 100);
      problem.matrix.assign(kSize, Values(kSize, 100));
      LoopNetwork transport(kSize, {.record_bytes = 64, .capacity = 2});
      transport.cut(0, 1, records);
      std::vector<int> right(kSize, 1);  // not bool: ranks write it at the same time
      const auto thrown = run_ranks(transport, kSize, [&](int rank) {
        Collective c = problem.of(rank);
        const auto input = encode(problem.dtype, problem.input(rank));
        auto output = encode(problem.dtype, problem.output(rank));
        c.input = input.data();
        c.output = output.data();
        const std::vector<Link*> links = transport.links(rank);
        Execution execution(shared_plan(algorithm, c), c, links);
        drive(execution);
        right[rank] = output == encode(problem.dtype, problem.expected(rank));
      });
      int lost = 0;
      for (int rank = 0; rank < kSize; ++rank) {
        EXPECT_TRUE(right[rank]);
        if (!thrown[rank]) continue;
        EXPECT_EQ(code_of(thrown[rank]), Code::peer_lost) << test::text_of(thrown[rank]);
        ++lost;
      }
      const bool needed = algorithm.kind != Kind::barrier || records == 0;  // a barrier sends there once
      EXPECT_GE(lost, needed ? 2 : 0);
    }
}

}  // namespace
}  // namespace lightcc
