// The links backend: every kind by its own choice of algorithm, several collectives in flight.
#include "collective/links.h"

#include <gtest/gtest.h>

#include "collective/selector.h"
#include "unit/simulated.h"

namespace lightcc {
namespace {

using namespace test;

constexpr Kind kKindsHere[] = {Kind::allreduce, Kind::reducescatter, Kind::allgather,
                               Kind::broadcast, Kind::alltoall,      Kind::barrier};

// One collective on one rank, with its memory.
struct Started {
  Started(LinksBackend& backend, const Problem& problem, int rank, std::string_view forced = "")
      : input(encode(problem.dtype, problem.input(rank))), output(encode(problem.dtype, problem.output(rank))),
        expected(encode(problem.dtype, problem.expected(rank))) {
    Collective c = problem.of(rank);
    c.input = input.data();
    c.output = output.data();
    Backend* const backends[] = {&backend};
    work = backend.start(c, Selector(backends, 2, forced).choose(c).algorithm);
  }
  std::vector<std::byte> input, output, expected;
  std::unique_ptr<Work> work;
};

TEST(Links, EveryKindSizeAndDtypeWithSeveralInFlight) {
  for (int size = 1; size <= 9; ++size) {
    const uint64_t seed = run_seed() + uint64_t(size);
    SCOPED_TRACE(testing::Message() << size << " ranks, seed " << seed);
    std::vector<Problem> problems;
    for (Kind kind : kKindsHere)
      for (DType dtype : {DType::int32, DType::float32, DType::float16})
        for (int64_t count : {0, 3, 250, 5000}) {
          problems.emplace_back(kind, size, count, seed + problems.size());
          problems.back().dtype = dtype;
        }
    LoopNetwork transport(size, {.record_bytes = 1000, .capacity = 2, .refuse = 0.1, .delay = 0.1, .seed = seed});
    std::vector<int> wrong(size_t(size), -1);
    const auto thrown = run_ranks(transport, size, [&](int rank) {
      LinksBackend backend(transport.links(rank));
      constexpr size_t kInFlight = 6;
      for (size_t first = 0; first < problems.size(); first += kInFlight) {
        std::vector<std::unique_ptr<Started>> started;
        std::vector<Work*> works;
        for (size_t i = first; i < std::min(first + kInFlight, problems.size()); ++i) {
          started.push_back(std::make_unique<Started>(backend, problems[i], rank));
          works.push_back(started.back()->work.get());
        }
        // Started in the same order everywhere, but stepped in another by each rank.
        std::shuffle(works.begin(), works.end(), std::mt19937_64(seed * 100 + uint64_t(rank)));
        drive(works);
        for (size_t i = 0; i < started.size(); ++i)
          if (started[i]->output != started[i]->expected) wrong[rank] = int(first + i);
      }
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(text_of(thrown[rank]), "") << "rank " << rank;
      EXPECT_EQ(wrong[rank], -1) << "rank " << rank << ": a wrong "
                                 << (wrong[rank] < 0 ? "" : name_of(problems[size_t(wrong[rank])].kind));
    }
  }
}

// More shapes than are remembered, all again and again: another shape's schedule would give a wrong result or hang.
TEST(Links, RemembersSchedulesByTheirShape) {
  LoopNetwork transport(2);
  const auto thrown = run_ranks(transport, 2, [&](int rank) {
    LinksBackend backend(transport.links(rank));
    for (int again = 0; again < 4; ++again)
      for (int shape = 0; shape < 200; ++shape) {
        Problem problem(kKindsHere[shape % 5], 2, shape / 5 * 3, uint64_t(shape));
        problem.root = again % 2;
        problem.pre = 1 + again / 2;
        Started one(backend, problem, rank, "allreduce=ring");
        drive(*one.work);
        if (one.output != one.expected) throw std::runtime_error("shape " + std::to_string(shape) + " is wrong");
      }
  });
  EXPECT_EQ(text_of(thrown[0]), "");
  EXPECT_EQ(text_of(thrown[1]), "");
}

TEST(Links, AcceptsWhatItCanRun) {
  LoopNetwork transport(2);
  LinksBackend backend(transport.links(0));
  EXPECT_STREQ(backend.name(), "links");
  for (Kind kind : kKindsHere) EXPECT_TRUE(backend.accepts(Problem(kind, 2, 1, 1).of(0))) << name_of(kind);
  Collective c = Problem(Kind::allreduce, 2, 1, 1).of(0);
  for (Kind kind : {Kind::add_group, Kind::remove_group}) {
    c.kind = kind;
    EXPECT_FALSE(backend.accepts(c)) << name_of(kind);
  }
  c.kind = Kind::reducescatter;
  c.op = ReduceOp::adasum;
  EXPECT_FALSE(backend.accepts(c));
  EXPECT_THROW(backend.start(c, find_algorithm(Kind::reducescatter, "ring")), Error);
  c.op = ReduceOp::sum;
  EXPECT_THROW(backend.start(c, nullptr), Error);
  EXPECT_THROW(backend.start(c, find_algorithm(Kind::allreduce, "ring")), Error);
  c.op = ReduceOp::adasum;
  c.kind = Kind::allreduce;
  c.dtype = DType::bfloat16;
  EXPECT_FALSE(backend.accepts(c)) << "where are its tensors?";
  c.tensors = {{0, c.count}};
  EXPECT_TRUE(backend.accepts(c));
  c.dtype = DType::int32;
  EXPECT_FALSE(backend.accepts(c)) << "Adasum needs fractions";
  c.kind = Kind::broadcast;
  EXPECT_TRUE(backend.accepts(c)) << "the operation does not matter to a broadcast";
  c.size = 3;
  EXPECT_FALSE(backend.accepts(c));
}

TEST(Links, TurnsAreTakenInTheOrderOfStart) {
  LoopNetwork transport(2);
  LinksBackend backend(transport.links(0));
  Problem problem(Kind::broadcast, 2, 4, 1);
  Started first(backend, problem, 0), second(backend, problem, 0);
  EXPECT_FALSE(second.work->step());
  EXPECT_FALSE(second.work->done());
  EXPECT_TRUE(first.work->step());
  EXPECT_TRUE(first.work->done());
  EXPECT_FALSE(second.work->done());
  EXPECT_TRUE(second.work->step());
  EXPECT_TRUE(second.work->done());
}

TEST(Links, WhoeverWaitsForATurnWaitsForThePeerOfTheFirst) {
  LoopNetwork transport(3);
  LinksBackend backend(transport.links(0));
  Problem problem(Kind::broadcast, 3, 4, 1);
  problem.root = 2;
  Started first(backend, problem, 0), second(backend, problem, 0);
  EXPECT_FALSE(first.work->step());
  EXPECT_FALSE(second.work->step());
  EXPECT_EQ(first.work->waiting_for(), 2);
  EXPECT_EQ(second.work->waiting_for(), 2);
}

// Of ranks that are placed in turns, a ring goes to the neighbour on the same host first.
TEST(Links, AllreducesTakeMembersByHost) {
  LoopNetwork transport(4);
  LinksBackend backend(transport.links(0), {{0, 2}, {1, 3}});
  Started ring(backend, Problem(Kind::allreduce, 4, 16, 1), 0, "allreduce=ring");
  EXPECT_TRUE(ring.work->step());
  EXPECT_NE(transport.link(2, 0)->peek(4 * sizeof(int64_t)), nullptr);
  EXPECT_EQ(transport.link(1, 0)->peek(4 * sizeof(int64_t)), nullptr);
  EXPECT_EQ(ring.work->waiting_for(), 3) << "a member, whatever its number in the ring";
}

TEST(Links, ACollectiveGivenUpBreaksTheNext) {
  LoopNetwork transport(2);
  LinksBackend backend(transport.links(0));
  { Started dropped(backend, Problem(Kind::allreduce, 2, 4, 1), 0); }
  Started next(backend, Problem(Kind::allreduce, 2, 4, 1), 0);
  EXPECT_THROW(next.work->step(), Error);
}

TEST(Links, ALostPeerRaisesOnAllWhoNeedIt) {
  constexpr int kSize = 5;
  for (Kind kind : kKindsHere) {
    LoopNetwork transport(kSize, {.record_bytes = 256, .capacity = 1});
    Problem problem(kind, kSize, 5000, 1);
    problem.counts.assign(kSize, 1000);
    problem.matrix.assign(kSize, Values(kSize, 1000));
    const auto thrown = run_ranks(transport, kSize, [&](int rank) {
      LinksBackend backend(transport.links(rank));
      if (rank == 3) throw Error(Code::shut_down, "rank 3 leaves");
      Started one(backend, problem, rank);
      drive(*one.work);
    });
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank == 3 || (kind == Kind::broadcast && rank != 2)) continue;  // in the tree only 2 leads to 3
      EXPECT_EQ(code_of(thrown[rank]), Code::peer_lost) << name_of(kind) << " rank " << rank;
    }
  }
}

}  // namespace
}  // namespace lightcc
