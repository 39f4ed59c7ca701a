// Every algorithm, every rank, without I/O: a network of plain loops runs the schedules in lockstep and knows what
// a schedule may not do. A message waits here until its receiver has come to the matching step, so what does
// not deadlock here needs no buffer anywhere.
#include "collective/algorithms.h"

#include <gtest/gtest.h>

#include "simulated.h"

namespace lightcc {
namespace {

using namespace test;

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SimulatedRank {
  Schedule rounds;
  Values memories[3];
  bool in_place = false;  // input and output are one memory
  size_t round = 0;
  std::vector<bool> moved;

  bool done() const { return round == rounds.size(); }
  Values& memory(Memory m) { return memories[int(in_place && m == Memory::input ? Memory::output : m)]; }
  void enter_round() {
    for (; !done(); ++round) {
      moved.clear();
      for (const Step& step : rounds[round]) moved.push_back(step.count == 0);
      if (!std::all_of(moved.begin(), moved.end(), [](bool m) { return m; })) return;
    }
  }
  // The first step of this round that waits to go in that direction.
  int next(int peer, bool receives) const {
    if (done()) return -1;
    for (size_t i = 0; i < moved.size(); ++i) {
      const Step& step = rounds[round][i];
      if (!moved[i] && !step.is_local() && step.peer == peer && step.writes() == receives) return int(i);
    }
    return -1;
  }
};

std::string name_of_step(int rank, size_t round, size_t step) {
  return "rank " + std::to_string(rank) + ", round " + std::to_string(round) + ", step " + std::to_string(step);
}

// Steps of one round that could meet in memory, and ranges that leave it.
void check_memory(SimulatedRank& rank, int index) {
  struct Access { size_t step; bool writes; Memory memory; int64_t begin, end; };
  for (size_t r = 0; r < rank.rounds.size(); ++r) {
    std::vector<Access> accesses;
    for (size_t s = 0; s < rank.rounds[r].size(); ++s) {
      const Step& step = rank.rounds[r][s];
      const auto add = [&](bool writes, Place at) {
        if (step.count == 0) return;
        if (writes && at.memory == Memory::input) throw Fault("writes the input: " + name_of_step(index, r, s));
        if (at.offset < 0 || at.offset + step.count > int64_t(rank.memory(at.memory).size()))
          throw Fault("leaves its memory: " + name_of_step(index, r, s));
        const bool output = rank.in_place && at.memory == Memory::input;
        accesses.push_back({s, writes, output ? Memory::output : at.memory, at.offset, at.offset + step.count});
      };
      if (step.reads()) add(false, step.from);
      for (int slot = 0; slot < step.slots; ++slot)
        add(false, {step.theirs.memory, step.theirs.offset + slot * step.count});
      if (step.writes()) add(true, step.to);
    }
    for (const Access& a : accesses)
      for (const Access& b : accesses) {
        if (!a.writes || a.memory != b.memory || a.begin >= b.end || b.begin >= a.end) continue;
        const bool same_step = a.step == b.step;
        if (same_step && a.begin == b.begin) continue;  // itself, or an update in place
        throw Fault((b.writes ? "write/write" : "read/write") + std::string(" conflict: ") +
                    name_of_step(index, r, a.step) + " and step " + std::to_string(b.step));
      }
  }
}

// What is sent in place stays as it is for good, but for what its receiver sends later.
void check_lent(SimulatedRank& rank, int index) {
  struct Lent { int peer; Memory memory; int64_t begin, end; };
  std::vector<Lent> lent;
  const auto alias = [&](Memory m) { return rank.in_place && m == Memory::input ? Memory::output : m; };
  for (size_t r = 0; r < rank.rounds.size(); ++r) {
    for (size_t s = 0; s < rank.rounds[r].size(); ++s) {
      const Step& step = rank.rounds[r][s];
      for (const Lent& one : lent)
        if (step.writes() && !(step.kind == Step::Kind::recv && step.peer == one.peer) &&
            alias(step.to.memory) == one.memory && step.to.offset < one.end && one.begin < step.to.offset + step.count)
          throw Fault("writes what is being sent: " + name_of_step(index, r, s));
    }
    for (const Step& step : rank.rounds[r]) {
      if (!step.in_place) continue;
      if (step.kind != Step::Kind::send || step.from.memory == Memory::scratch)
        throw Fault("sends in place what is gone in the end: " + name_of_step(index, r, 0));
      lent.push_back({step.peer, alias(step.from.memory), step.from.offset, step.from.offset + step.count});
    }
  }
}

// Runs the ranks to their end, or throws a Fault that says why they cannot get there.
void simulate(std::vector<SimulatedRank>& ranks, const Problem& problem) {
  const int size = int(ranks.size());
  for (int r = 0; r < size; ++r) {
    ranks[r].memories[int(Memory::scratch)].assign(size_t(scratch_count(ranks[r].rounds)), -77);
    check_memory(ranks[r], r);
    check_lent(ranks[r], r);
    ranks[r].enter_round();
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (int r = 0; r < size; ++r) {
      SimulatedRank& rank = ranks[r];
      for (size_t i = 0; !rank.done() && i < rank.rounds[rank.round].size(); ++i) {
        const Step& step = rank.rounds[rank.round][i];
        if (rank.moved[i]) continue;
        const double post = step.completes ? problem.post : 1;
        if (step.kind == Step::Kind::copy) {
          const double pre = step.from.memory == Memory::input ? problem.pre : 1;
          for (int64_t k = 0; k < step.count; ++k)
            rank.memory(step.to.memory)[step.to.offset + k] = Problem::scaled(
                post, Problem::scaled(pre, rank.memory(step.from.memory)[step.from.offset + k]));
        } else if (step.kind == Step::Kind::reduce) {
          for (int64_t k = 0; k < step.count; ++k) {
            int64_t value = rank.memory(step.from.memory)[step.from.offset + k];
            for (int slot = 0; slot < step.slots; ++slot)
              value = Problem::combine(problem.op, value,
                                       rank.memory(step.theirs.memory)[step.theirs.offset + slot * step.count + k]);
            rank.memory(step.to.memory)[step.to.offset + k] = Problem::scaled(post, value);
          }
        } else if (step.writes()) {
          if (step.peer < 0 || step.peer >= size || rank.next(step.peer, true) != int(i)) continue;
          SimulatedRank& sender = ranks[step.peer];
          const int sent = sender.next(r, false);
          if (sent < 0) continue;
          const Step& send = sender.rounds[sender.round][sent];
          if (send.count != step.count)
            throw Fault("size mismatch: " + name_of_step(r, rank.round, i) + " wants " + std::to_string(step.count) +
                        ", " + name_of_step(step.peer, sender.round, sent) + " sends " + std::to_string(send.count));
          for (int64_t k = 0; k < step.count; ++k) {
            int64_t value = sender.memory(send.from.memory)[send.from.offset + k];
            if (step.kind == Step::Kind::recv_reduce)
              value = Problem::scaled(
                  post, Problem::combine(problem.op, rank.memory(step.from.memory)[step.from.offset + k], value));
            rank.memory(step.to.memory)[step.to.offset + k] = value;
          }
          sender.moved[sent] = true;
        } else {
          continue;  // the receiver takes it
        }
        rank.moved[i] = progress = true;
      }
    }
    for (SimulatedRank& rank : ranks)
      if (!rank.done() && std::all_of(rank.moved.begin(), rank.moved.end(), [](bool m) { return m; })) {
        ++rank.round;
        rank.enter_round();
      }
  }
  for (int r = 0; r < size; ++r) {
    if (ranks[r].done()) continue;
    const auto& moved = ranks[r].moved;
    const size_t i = size_t(std::find(moved.begin(), moved.end(), false) - moved.begin());
    const int peer = ranks[r].rounds[ranks[r].round][i].peer;
    const bool gone = peer < 0 || peer >= size || ranks[peer].done();
    throw Fault((gone ? "unmatched: " : "deadlock: ") + name_of_step(r, ranks[r].round, i));
  }
}

void check(const Algorithm& algorithm, const Problem& problem, bool in_place = false) {
  SCOPED_TRACE(testing::Message() << name_of(algorithm.kind) << "/" << algorithm.name << " size " << problem.size
                                  << " count " << problem.count << " root " << problem.root << " op "
                                  << name_of(problem.op) << " pre " << problem.pre << " seed " << problem.seed
                                  << (in_place ? " in place" : ""));
  std::vector<SimulatedRank> ranks(static_cast<size_t>(problem.size));
  for (int r = 0; r < problem.size; ++r) {
    ranks[r].rounds = plan(algorithm, problem.of(r));
    ranks[r].in_place = in_place;
    ranks[r].memories[int(Memory::input)] = problem.input(r);
    ranks[r].memories[int(Memory::output)] = in_place ? problem.input(r) : problem.output(r);
  }
  try {
    simulate(ranks, problem);
  } catch (const Fault& fault) {
    FAIL() << fault.what();
  }
  for (int r = 0; r < problem.size; ++r) {
    ASSERT_EQ(ranks[r].memories[int(Memory::output)], problem.expected(r)) << "rank " << r;
    if (in_place) continue;
    ASSERT_EQ(ranks[r].memories[int(Memory::input)], problem.input(r)) << "rank " << r;
  }
}

TEST(Algorithms, AnySizeCountRootAndFactors) {
  uint64_t seed = run_seed();
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.adasum) continue;  // it has no whole numbers: adasum_test.cc
    for (int size = 1; size <= 17; ++size)
      for (int64_t count : {0, 1, 2, 3, 7, 16, 37, 101}) {
        Problem problem(algorithm.kind, size, count, ++seed);
        for (problem.root = 0; problem.root < (algorithm.kind == Kind::broadcast ? size : 1); ++problem.root) {
          check(algorithm, problem);
          if (HasFatalFailure()) return;
        }
        problem.root = 0;
        if (!problem.reduces()) continue;
        for (bool scaled : {false, true}) {
          problem.pre = scaled ? 0.5 : 1;
          problem.post = scaled ? 1.5 : 3;
          for (bool in_place : {false, true}) {
            if (in_place && algorithm.kind != Kind::allreduce) continue;
            check(algorithm, problem, in_place);
            if (HasFatalFailure()) return;
          }
        }
      }
  }
}

// How many of so many sends go straight out of the caller's memory.
TEST(Algorithms, SendsInPlaceWhatIsNotOverwritten) {
  struct Expected { Kind kind; const char* name; int sends, in_place; };
  for (const Expected& one : {Expected{Kind::allreduce, "pairwise", 6, 6}, {Kind::allreduce, "ring", 6, 3},
                              {Kind::allreduce, "halving_doubling", 4, 4},
                              {Kind::allreduce, "recursive_doubling", 2, 0},
                              {Kind::allgather, "ring", 3, 3}, {Kind::reducescatter, "pairwise", 3, 3},
                              {Kind::reducescatter, "ring", 3, 1}, {Kind::alltoall, "pairwise", 3, 3}}) {
    const Problem problem(one.kind, 4, 64, 1);
    int sends = 0, in_place = 0;
    for (const auto& round : plan(*find_algorithm(one.kind, one.name), problem.of(0)))
      for (const Step& step : round) {
        sends += step.kind == Step::Kind::send;
        in_place += step.in_place;
      }
    EXPECT_EQ(sends, one.sends) << one.name;
    EXPECT_EQ(in_place, one.in_place) << one.name;
  }
}

TEST(Algorithms, LongBroadcastGoesInPieces) {
  const Algorithm& binomial = *find_algorithm(Kind::broadcast, "binomial");
  for (int size : {2, 5, 8}) {
    Problem problem(Kind::broadcast, size, 3 * 65536 + 5, run_seed());
    problem.root = size - 1;
    check(binomial, problem);
    EXPECT_EQ(plan(binomial, problem.of(problem.root)).size(), 3u);
  }
  const Problem huge(Kind::broadcast, 2, int64_t(1) << 40, 1);
  EXPECT_EQ(plan(binomial, huge.of(0)).size(), 64u);
}

int64_t sent(const Schedule& rounds) {
  int64_t count = 0;
  for (const auto& round : rounds)
    for (const Step& step : round) count += step.kind == Step::Kind::send ? step.count : 0;
  return count;
}

// Start-ups and volume as in the literature, for 16 ranks with 16 x 8 elements.
TEST(Algorithms, RoundsAndVolume) {
  Collective c = Problem(Kind::allreduce, 16, 128, 1).of(3);
  struct Cost { const char* name; size_t rounds; int64_t sent; };
  for (const Cost& cost : {Cost{"ring", 30, 2 * 15 * 8}, Cost{"recursive_doubling", 4, 4 * 128},
                           Cost{"halving_doubling", 8, 2 * 15 * 8}, Cost{"pairwise", 3, 2 * 15 * 8}}) {
    const Schedule rounds = plan(*find_algorithm(Kind::allreduce, cost.name), c);
    EXPECT_EQ(rounds.size(), cost.rounds) << cost.name;
    EXPECT_EQ(sent(rounds), cost.sent) << cost.name;
  }
  c.counts.assign(16, 8);
  for (const Cost& cost : {Cost{"ring", 16, 15 * 8}, Cost{"bruck", 5, 15 * 8}}) {  // the first round is a copy
    const Schedule rounds = plan(*find_algorithm(Kind::allgather, cost.name), c);
    EXPECT_EQ(rounds.size(), cost.rounds) << cost.name;
    EXPECT_EQ(sent(rounds), cost.sent) << cost.name;
  }
  EXPECT_EQ(plan(*find_algorithm(Kind::barrier, "dissemination"), c).size(), 4u);
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
  for (int size = 2; size <= 17; ++size)
    for (int late = 0; late < size; ++late) {
      Problem problem(Kind::barrier, size, 0, 1);
      std::vector<SimulatedRank> ranks(static_cast<size_t>(size));
      for (int r = 0; r < size; ++r)
        if (r != late) ranks[r].rounds = plan(*find_algorithm(Kind::barrier, "dissemination"), problem.of(r));
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

TEST(SimulatedNetwork, SeesFaults) {
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
