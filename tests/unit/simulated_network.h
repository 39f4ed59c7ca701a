// A network of plain loops that runs the schedules of all ranks in lockstep and knows what a schedule may not do. A
// message waits here until its receiver has come to the matching step, so what does not deadlock here needs no buffer
// anywhere.
#pragma once
#include <gtest/gtest.h>

#include "collective/algorithms.h"
#include "simulated.h"

namespace lightcc::test {

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

inline std::string name_of_step(int rank, size_t round, size_t step) {
  return "rank " + std::to_string(rank) + ", round " + std::to_string(round) + ", step " + std::to_string(step);
}

// Steps of one round that could meet in memory, and ranges that leave it.
inline void check_memory(SimulatedRank& rank, int index) {
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
inline void check_lent(SimulatedRank& rank, int index) {
  struct Lent { int peer; Memory memory; int64_t begin, end; };
  std::vector<Lent> lent;
  const auto alias = [&](Memory m) { return rank.in_place && m == Memory::input ? Memory::output : m; };
  for (size_t r = 0; r < rank.rounds.size(); ++r) {
    for (size_t s = 0; s < rank.rounds[r].size(); ++s) {
      const Step& step = rank.rounds[r][s];
      for (const Lent& one : lent)
        if (step.writes() && !(step.kind == Step::Action::recv && step.peer == one.peer) &&
            alias(step.to.memory) == one.memory && step.to.offset < one.end && one.begin < step.to.offset + step.count)
          throw Fault("writes what is being sent: " + name_of_step(index, r, s));
    }
    for (const Step& step : rank.rounds[r]) {
      if (!step.may_lend) continue;
      if (step.kind != Step::Action::send || step.from.memory == Memory::scratch)
        throw Fault("sends in place what is gone in the end: " + name_of_step(index, r, 0));
      lent.push_back({step.peer, alias(step.from.memory), step.from.offset, step.from.offset + step.count});
    }
  }
}

// Runs the ranks to their end, or throws a Fault that says why they cannot get there.
inline void simulate(std::vector<SimulatedRank>& ranks, const Problem& problem) {
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
        if (step.kind == Step::Action::copy) {
          const double pre = step.from.memory == Memory::input ? problem.pre : 1;
          for (int64_t k = 0; k < step.count; ++k)
            rank.memory(step.to.memory)[step.to.offset + k] = Problem::scaled(
                post, Problem::scaled(pre, rank.memory(step.from.memory)[step.from.offset + k]));
        } else if (step.kind == Step::Action::reduce) {
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
            if (step.kind == Step::Action::recv_reduce)
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

inline void check(const Algorithm& algorithm, const Problem& problem, const Hosts& hosts, bool in_place = false) {
  SCOPED_TRACE(testing::Message() << name_of(algorithm.kind) << "/" << algorithm.name << " size " << problem.size
                                  << " count " << problem.count << " root " << problem.root << " op "
                                  << name_of(problem.op) << " pre " << problem.pre << " seed " << problem.seed
                                  << (in_place ? " in place" : "") << " on " << text_of(hosts));
  std::vector<SimulatedRank> ranks(static_cast<size_t>(problem.size));
  for (int r = 0; r < problem.size; ++r) {
    ranks[r].rounds = plan(algorithm, problem.of(r), hosts);
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

}  // namespace lightcc::test
