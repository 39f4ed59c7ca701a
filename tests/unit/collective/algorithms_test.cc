// Every algorithm, every rank, without I/O, on one host.
#include "collective/algorithms.h"

#include <gtest/gtest.h>

#include "labels.h"
#include "unit/simulated_network.h"

LABEL(alone);

namespace lightcc {
namespace {

using namespace test;

TEST(Algorithms, AnySizeCountRootAndFactors) {
  uint64_t seed = run_seed();
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.adasum) continue;  // it has no whole numbers: adasum_test.cc
    for (int size = 1; size <= 17; ++size)
      for (int64_t count : {0, 1, 2, 3, 7, 16, 37, 101}) {
        Problem problem(algorithm.kind, size, count, ++seed);
        for (problem.root = 0; problem.root < (algorithm.kind == Kind::broadcast ? size : 1); ++problem.root) {
          check(algorithm, problem, one_host(size));
          if (HasFatalFailure()) return;
        }
        problem.root = 0;
        if (!problem.reduces()) continue;
        for (bool scaled : {false, true}) {
          problem.pre = scaled ? 0.5 : 1;
          problem.post = scaled ? 1.5 : 3;
          for (bool in_place : {false, true}) {
            if (in_place && algorithm.kind != Kind::allreduce) continue;
            check(algorithm, problem, one_host(size), in_place);
            if (HasFatalFailure()) return;
          }
        }
      }
  }
}

// How many of so many sends may go straight out of the caller's memory.
TEST(Algorithms, WhatIsNotOverwrittenMayBeLent) {
  struct Expected { Kind kind; const char* name; int sends, lent; };
  for (const Expected& one : {Expected{Kind::allreduce, "pairwise", 6, 6}, {Kind::allreduce, "ring", 6, 3},
                              {Kind::allreduce, "halving_doubling", 4, 4},
                              {Kind::allreduce, "recursive_doubling", 2, 0},
                              {Kind::allgather, "ring", 3, 3}, {Kind::reducescatter, "pairwise", 3, 3},
                              {Kind::reducescatter, "ring", 3, 1}, {Kind::alltoall, "pairwise", 3, 3}}) {
    const Problem problem(one.kind, 4, 64, 1);
    for (int rank = 0; rank < 4; ++rank) {
      int sends = 0, lent = 0;
      for (const auto& round : plan(*find_algorithm(one.kind, one.name), problem.of(rank), one_host(4)))
        for (const Step& step : round) {
          sends += step.kind == Step::Action::send;
          lent += step.may_lend;
        }
      EXPECT_EQ(sends, one.sends) << one.name << ", rank " << rank;
      EXPECT_EQ(lent, one.lent) << one.name << ", rank " << rank;
    }
  }
}

TEST(Algorithms, LongBroadcastGoesInPieces) {
  const Algorithm& binomial = *find_algorithm(Kind::broadcast, "binomial");
  for (int size : {2, 5, 8}) {
    Problem problem(Kind::broadcast, size, 3 * 65536 + 5, run_seed());
    problem.root = size - 1;
    check(binomial, problem, one_host(size));
    EXPECT_EQ(plan(binomial, problem.of(problem.root), one_host(size)).size(), 3u);
  }
  const Problem huge(Kind::broadcast, 2, int64_t(1) << 40, 1);
  EXPECT_EQ(plan(binomial, huge.of(0), one_host(2)).size(), 64u);
}

int64_t sent(const Schedule& rounds) {
  int64_t count = 0;
  for (const auto& round : rounds)
    for (const Step& step : round) count += step.kind == Step::Action::send ? step.count : 0;
  return count;
}

// Start-ups and volume as in the literature, for 16 ranks with 16 x 8 elements.
TEST(Algorithms, RoundsAndVolumeAreThoseOfTheFormulas) {
  Collective c = Problem(Kind::allreduce, 16, 128, 1).of(3);
  struct Cost { const char* name; size_t rounds; int64_t sent; };
  for (const Cost& cost : {Cost{"ring", 30, 2 * 15 * 8}, Cost{"recursive_doubling", 4, 4 * 128},
                           Cost{"halving_doubling", 8, 2 * 15 * 8}, Cost{"pairwise", 3, 2 * 15 * 8}}) {
    const Schedule rounds = plan(*find_algorithm(Kind::allreduce, cost.name), c, one_host(16));
    EXPECT_EQ(rounds.size(), cost.rounds) << cost.name;
    EXPECT_EQ(sent(rounds), cost.sent) << cost.name;
  }
  c.counts.assign(16, 8);
  for (const Cost& cost : {Cost{"ring", 16, 15 * 8}, Cost{"bruck", 5, 15 * 8}}) {  // the first round is a copy
    const Schedule rounds = plan(*find_algorithm(Kind::allgather, cost.name), c, one_host(16));
    EXPECT_EQ(rounds.size(), cost.rounds) << cost.name;
    EXPECT_EQ(sent(rounds), cost.sent) << cost.name;
  }
  EXPECT_EQ(plan(*find_algorithm(Kind::barrier, "dissemination"), c, one_host(16)).size(), 4u);
}

TEST(Algorithms, TableNamesEach) {
  const std::string text = algorithms_text();
  for (const Algorithm& a : algorithms()) {
    EXPECT_EQ(find_algorithm(a.kind, a.name), &a) << "the name is not unique in its kind";
    EXPECT_NE(text.find(a.name), std::string::npos);
  }
  EXPECT_EQ(find_algorithm(Kind::barrier, "ring"), nullptr);
}

// A barrier ends on no rank before it has begun on all.
TEST(Algorithms, BarrierWaitsForEachRank) {
  const Algorithm& barrier = *find_algorithm(Kind::barrier, "dissemination");
  for (int size = 2; size <= 17; ++size)
    for (int late = 0; late < size; ++late) {
      Problem problem(Kind::barrier, size, 0, 1);
      std::vector<SimulatedRank> ranks(static_cast<size_t>(size));
      for (int r = 0; r < size; ++r)
        if (r != late) ranks[r].rounds = plan(barrier, problem.of(r), one_host(size));
      EXPECT_THROW(simulate(ranks, problem), Fault);
      for (int r = 0; r < size; ++r) EXPECT_TRUE(r == late || !ranks[r].done()) << "rank " << r << " of " << size;
    }
}

// The network above must see what it is there to see.
std::string fault_of(std::vector<Schedule> schedules, bool in_place = false) {
  const Problem problem(Kind::allreduce, 2, 4, 1);
  std::vector<SimulatedRank> ranks(schedules.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    ranks[r].rounds = schedules[r];
    ranks[r].in_place = in_place;
    ranks[r].memories[int(Memory::input)] = ranks[r].memories[int(Memory::output)] = Values(4);
  }
  try {
    simulate(ranks, problem);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "none";
}

TEST(SimulatedNetwork, DeadlocksAndWrongSizesAreNoticed) {
  const Place in{Memory::input, 0}, out{Memory::output, 0};
  const auto starts = [](const std::string& text, const char* start) { return text.rfind(start, 0) == 0; };
  const auto exchange = [&](int peer) { return Schedule{{Step::send(peer, in, 4), Step::recv(peer, out, 4)}}; };
  EXPECT_EQ(fault_of({exchange(1), exchange(0)}), "none");
  EXPECT_TRUE(starts(fault_of({{{Step::send(1, in, 4)}, {Step::recv(1, out, 4)}},
                               {{Step::send(0, in, 4)}, {Step::recv(0, out, 4)}}}), "deadlock"));
  EXPECT_TRUE(starts(fault_of({{{Step::send(1, in, 4)}}, {}}), "unmatched"));
  EXPECT_TRUE(starts(fault_of({{}, {{Step::recv(0, out, 4)}}}), "unmatched"));
  EXPECT_TRUE(starts(fault_of({{{Step::send(1, in, 4)}}, {{Step::recv(0, out, 3)}}}), "size mismatch"));
  EXPECT_TRUE(starts(fault_of({{{Step::send(1, in, 5)}}, {{Step::recv(0, out, 5)}}}), "leaves its memory"));
  EXPECT_TRUE(starts(fault_of({{{Step::copy(out, in, 1)}}}), "writes the input"));
  EXPECT_TRUE(starts(fault_of({{{Step::copy(in, out, 2), Step::copy({Memory::input, 2}, {Memory::output, 1}, 2)}}}),
                     "write/write conflict"));
  EXPECT_TRUE(starts(fault_of({{{Step::copy(in, out, 2), Step::send(1, {Memory::output, 1}, 2)}},
                               {{Step::recv(0, out, 2)}}}), "read/write conflict"));
  EXPECT_TRUE(starts(fault_of({exchange(1), exchange(0)}, true), "read/write conflict"));
}

}  // namespace
}  // namespace lightcc
