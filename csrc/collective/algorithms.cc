#include "collective/algorithms.h"

#include <cstdio>

#include "collective/adasum.h"
#include "collective/blocks.h"
#include "collective/broadcast.h"
#include "collective/by_host.h"
#include "collective/fold.h"

namespace lightcc {
namespace {

int right_of(const Collective& c, int distance = 1) { return (c.index + distance) % c.size; }
int left_of(const Collective& c, int distance = 1) { return (c.index - distance + c.size) % c.size; }

// What a reduction is when there is nobody to reduce with.
Schedule alone(int64_t count) { return {{Step::copy({kInput, 0}, {kOutput, 0}, count, true)}}; }

// Ring all-gather in the output. Rank r's own block, block r, is taken from `own` when it is first sent.
void ring_gather(Schedule& rounds, const Collective& c, const Blocks& blocks, Place own) {
  for (int s = 0; s < c.size - 1; ++s) {
    const int out = c.index - s, in = out - 1;
    rounds.push_back({Step::send(right_of(c), s == 0 ? own : Place{kOutput, blocks.offset(out)}, blocks.count(out)),
                      Step::recv(left_of(c), {kOutput, blocks.offset(in)}, blocks.count(in))});
  }
}

// Block b sets out from rank b+1 and gathers every rank's share on its way round to rank b.
Schedule allreduce_ring(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c.count);
  const Blocks blocks(c.count, c.size);
  Schedule rounds;
  for (int s = 0; s < c.size - 1; ++s) {
    const int out = c.index - s - 1, in = out - 1;
    const int64_t at = blocks.offset(in);
    rounds.push_back({Step::send(right_of(c), {s == 0 ? kInput : kOutput, blocks.offset(out)}, blocks.count(out)),
                      Step::recv_reduce(left_of(c), {kInput, at}, {kOutput, at}, blocks.count(in), s == c.size - 2)});
  }
  ring_gather(rounds, c, blocks, {kOutput, blocks.offset(c.index)});
  return rounds;
}

// A collective whose ranks are numbered by host, and back: a ring of these numbers leaves a host once.
Collective numbered_by_host(Collective c, const std::vector<int>& order) {
  c.index = int(std::find(order.begin(), order.end(), c.index) - order.begin());
  return c;
}
Schedule numbered_as_members(Schedule rounds, const std::vector<int>& order) {
  for (auto& round : rounds)
    for (Step& step : round)
      if (!step.is_local()) step.peer = order[size_t(step.peer)];
  return rounds;
}

// As above; partial sums alternate between two slots of scratch, since the output has room for block r only.
Schedule reducescatter_ring(const Collective& member, const Hosts& hosts) {
  if (member.size == 1) return alone(member.counts[0]);
  const std::vector<int> order = in_host_order(hosts);
  const Collective c = numbered_by_host(member, order);
  const Blocks blocks(c.counts, order);
  const int64_t slot = *std::max_element(c.counts.begin(), c.counts.end());
  Schedule rounds;
  for (int s = 0; s < c.size - 1; ++s) {
    const int out = c.index - s - 1, in = out - 1;
    const bool last = s == c.size - 2;
    const Place partial = s == 0 ? Place{kInput, blocks.offset(out)} : Place{kScratch, (s - 1) % 2 * slot};
    const Place sum = last ? Place{kOutput, 0} : Place{kScratch, s % 2 * slot};
    rounds.push_back({Step::send(right_of(c), partial, blocks.count(out)),
                      Step::recv_reduce(left_of(c), {kInput, blocks.offset(in)}, sum, blocks.count(in), last)});
  }
  return numbered_as_members(std::move(rounds), order);
}

// Every rank sends each block of its input straight to the block's owner, one owner a round.
Schedule reducescatter_pairwise(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c.counts[0]);
  const Blocks blocks(c.counts);
  Schedule rounds;
  for (int s = 1; s < c.size; ++s) {
    const int to = right_of(c, s);
    const Place sum = s == 1 ? Place{kInput, blocks.offset(c.index)} : Place{kOutput, 0};
    rounds.push_back({Step::send(to, {kInput, blocks.offset(to)}, blocks.count(to)),
                      Step::recv_reduce(left_of(c, s), sum, {kOutput, 0}, blocks.count(c.index), s == c.size - 1)});
  }
  return rounds;
}

// Each rank owns a block: all send theirs of it straight there, the owner sums up and sends the result straight to all.
Schedule allreduce_pairwise(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c.count);
  const Blocks blocks(c.count, c.size);
  const Place own{kOutput, blocks.offset(c.index)};
  const int64_t count = blocks.count(c.index);
  const bool two = c.size == 2;
  std::vector<Step> scatter, gather;
  for (int s = 1; s < c.size; ++s) {
    const int to = right_of(c, s), from = left_of(c, s);
    scatter.push_back(Step::send(to, {kInput, blocks.offset(to)}, blocks.count(to)));
    scatter.push_back(two ? Step::recv_reduce(from, {kInput, own.offset}, own, count, true)
                          : Step::recv(from, {kScratch, (s - 1) * count}, count));
    gather.push_back(Step::send(to, own, count));
    gather.push_back(Step::recv(from, {kOutput, blocks.offset(from)}, blocks.count(from)));
  }
  Schedule rounds{std::move(scatter)};
  if (!two) rounds.push_back({Step::reduce({kInput, own.offset}, {kScratch, 0}, c.size - 1, own, count, true)});
  rounds.push_back(std::move(gather));
  return rounds;
}

// The first round of both algorithms below; returns where the folded input lies afterwards.
Memory fold_in(Schedule& rounds, const Collective& c, const Fold& fold) {
  if (!fold.has_extra()) return kInput;
  rounds.push_back({Step::recv_reduce(c.index - 1, {kInput, 0}, {kOutput, 0}, c.count)});
  return kOutput;
}

// All data to rank XOR 1, 2, 4, ... A round may not write what it sends, so sums go from one slot of scratch
// to the other and only the last goes to the output (by a copy if it would come straight from the input,
// which may be the same memory).
Schedule allreduce_recursive_doubling(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c.count);
  const Fold fold(c);
  if (fold.index < 0) return folded_away(c);
  Schedule rounds;
  Place sum{fold_in(rounds, c, fold), 0};
  for (int mask = 1; mask < fold.power; mask *= 2) {
    const int peer = fold.rank(fold.index ^ mask);
    const bool last = mask * 2 == fold.power;
    Place next{kScratch, sum.memory == kScratch && sum.offset == 0 ? c.count : 0};
    if (last && sum.memory == kScratch) next = {kOutput, 0};
    rounds.push_back({Step::send(peer, sum, c.count), Step::recv_reduce(peer, sum, next, c.count, last)});
    sum = next;
  }
  if (sum.memory != kOutput) rounds.push_back({Step::copy(sum, {kOutput, 0}, c.count)});
  fold_out(rounds, c, fold);
  return rounds;
}

// Half of what is left to rank XOR 1, a quarter to XOR 2, ... until each rank has one piece summed up; then
// the way back. The large halves go to near ranks, which are likely on the same host.
Schedule allreduce_halving_doubling(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c.count);
  const Fold fold(c);
  if (fold.index < 0) return folded_away(c);
  std::vector<Halving> halvings;
  Schedule rounds;
  Memory sum = fold_in(rounds, c, fold);
  int64_t begin = 0, end = c.count;
  for (int mask = 1; mask < fold.power; mask *= 2) {
    const Halving& h = halvings.emplace_back(halve(fold, mask, begin, end));
    rounds.push_back({Step::send(h.peer, {sum, h.give}, h.give_count),
                      Step::recv_reduce(h.peer, {sum, h.keep}, {kOutput, h.keep}, h.keep_count,
                                        mask * 2 == fold.power)});
    sum = kOutput;
    begin = h.keep;
    end = h.keep + h.keep_count;
  }
  for (auto h = halvings.rbegin(); h != halvings.rend(); ++h)
    rounds.push_back({Step::send(h->peer, {kOutput, h->keep}, h->keep_count),
                      Step::recv(h->peer, {kOutput, h->give}, h->give_count)});
  fold_out(rounds, c, fold);
  return rounds;
}

Schedule allgather_ring(const Collective& member, const Hosts& hosts) {
  const std::vector<int> order = in_host_order(hosts);
  const Collective c = numbered_by_host(member, order);
  const Blocks blocks(c.counts, order);
  Schedule rounds{{Step::copy({kInput, 0}, {kOutput, blocks.offset(c.index)}, blocks.count(c.index))}};
  ring_gather(rounds, c, blocks, {kInput, 0});
  return numbered_as_members(std::move(rounds), order);
}

// With 2^k blocks in hand, r .. r + 2^k - 1, a rank gives them all to its left and gets as many from its right.
// Blocks lie at their place from the start, so a run of them is one piece, or two where it wraps.
Schedule allgather_bruck(const Collective& c, const Hosts&) {
  const Blocks blocks(c.counts);
  Schedule rounds{{Step::copy({kInput, 0}, {kOutput, blocks.offset(c.index)}, c.counts[c.index])}};
  for (int have = 1; have < c.size; have *= 2) {
    const int run = std::min(have, c.size - have);
    std::vector<Step> round;
    const auto for_pieces = [&](int first, auto add) {
      const int last = first + run - 1;
      const int64_t begin = blocks.offset(first), end = last < c.size ? blocks.end(last) : blocks.total();
      add(Place{kOutput, begin}, end - begin);
      if (last >= c.size) add(Place{kOutput, 0}, blocks.end(last));
    };
    const int to = left_of(c, have), from = right_of(c, have);
    for_pieces(c.index, [&](Place at, int64_t count) { round.push_back(Step::send(to, at, count)); });
    for_pieces(from, [&](Place at, int64_t count) { round.push_back(Step::recv(from, at, count)); });
    rounds.push_back(std::move(round));
  }
  return rounds;
}

Schedule alltoall_pairwise(const Collective& c, const Hosts&) {
  const Blocks in(c.send), out(c.counts);
  Schedule rounds{{Step::copy({kInput, in.offset(c.index)}, {kOutput, out.offset(c.index)}, c.send[c.index])}};
  for (int s = 1; s < c.size; ++s) {
    const int to = right_of(c, s), from = left_of(c, s);
    rounds.push_back({Step::send(to, {kInput, in.offset(to)}, c.send[to]),
                      Step::recv(from, {kOutput, out.offset(from)}, c.counts[from])});
  }
  return rounds;
}

// After k rounds a rank has heard, directly or not, from the 2^k - 1 ranks on its left. One element travels
// (a step of none would not), its value is of no concern.
Schedule barrier_dissemination(const Collective& c, const Hosts&) {
  Schedule rounds;
  for (int distance = 1; distance < c.size; distance *= 2)
    rounds.push_back({Step::send(right_of(c, distance), {kScratch, 0}, 1),
                      Step::recv(left_of(c, distance), {kScratch, 1}, 1)});
  return rounds;
}

constexpr const char* kThakur = "Thakur, Rabenseifner, Gropp 2005";
constexpr const char* kMaleki = "Maleki et al. 2021";
constexpr const char* kTraff = "Traff, Hunold 2020";
constexpr Algorithm kAlgorithms[] = {
    {Kind::allreduce, "ring", allreduce_ring, "Patarasuk, Yuan 2009"},
    {Kind::allreduce, "pairwise", allreduce_pairwise, kThakur},
    {Kind::allreduce, "recursive_doubling", allreduce_recursive_doubling, kThakur},
    {Kind::allreduce, "halving_doubling", allreduce_halving_doubling, kThakur},
    {Kind::allreduce, "adasum_whole", adasum_whole, kMaleki, true},
    {Kind::allreduce, "adasum_halving", adasum_halving, kMaleki, true},
    {Kind::reducescatter, "ring", reducescatter_ring, "Patarasuk, Yuan 2009"},
    {Kind::reducescatter, "pairwise", reducescatter_pairwise, kThakur},
    {Kind::reducescatter, "by_host", reducescatter_by_host, kTraff, false, true},
    {Kind::allgather, "ring", allgather_ring, kThakur},
    {Kind::allgather, "bruck", allgather_bruck, "Bruck et al. 1997"},
    {Kind::allgather, "by_host", allgather_by_host, kTraff, false, true},
    {Kind::broadcast, "binomial", broadcast_binomial, kThakur},
    {Kind::broadcast, "by_host", broadcast_by_host, "Kielmann et al. 1999", false, true},
    {Kind::alltoall, "pairwise", alltoall_pairwise, kThakur},
    {Kind::barrier, "dissemination", barrier_dissemination, "Hensgen, Finkel, Manber 1988"},
};

}  // namespace

std::span<const Algorithm> algorithms() { return kAlgorithms; }

const Algorithm* find_algorithm(Kind kind, std::string_view name) {
  for (const Algorithm& a : kAlgorithms)
    if (a.kind == kind && a.name == name) return &a;
  return nullptr;
}

std::string algorithms_text() {
  std::string text;
  char line[128];
  for (const Algorithm& a : kAlgorithms) {
    std::snprintf(line, sizeof line, "%-14s %-19s %s\n", name_of(a.kind), a.name, a.source);
    text += line;
  }
  return text;
}

namespace {

struct Write { int64_t begin, end; size_t round; int answers; };  // answers: from whom it is received, or -1

// Marks the sends whose memory no later round writes, but with what comes from the same peer. one_memory: the input may
// be the output. Otherwise it is never written; and scratch is never lent, since it goes with the Execution.
void mark_lendable(Schedule& rounds, bool one_memory) {
  std::vector<Write> writes;
  int64_t longest = 0;
  for (size_t round = 0; round < rounds.size(); ++round)
    for (const Step& step : rounds[round]) {
      if (!step.writes() || step.to.memory != kOutput || step.count == 0) continue;
      const int answers = step.kind == Step::Action::recv ? step.peer : -1;
      writes.push_back({step.to.offset, step.to.offset + step.count, round, answers});
      longest = std::max(longest, step.count);
    }
  const auto starts_before = [](const Write& one, int64_t begin) { return one.begin < begin; };
  std::sort(writes.begin(), writes.end(), [](const Write& a, const Write& b) { return a.begin < b.begin; });
  const auto is_written_later = [&](const Step& send, size_t round) {
    if (send.from.memory == kInput && !one_memory) return false;
    const int64_t begin = send.from.offset, end = begin + send.count;
    auto one = std::lower_bound(writes.begin(), writes.end(), begin - longest, starts_before);
    for (; one != writes.end() && one->begin < end; ++one)
      if (one->round > round && one->end > begin && one->answers != send.peer) return true;
    return false;
  };
  for (size_t round = 0; round < rounds.size(); ++round)
    for (Step& step : rounds[round])
      if (step.kind == Step::Action::send && (step.from.memory == kInput || step.from.memory == kOutput))
        step.may_lend = !is_written_later(step, round);
}

}  // namespace

Schedule plan(const Algorithm& algorithm, const Collective& c, const Hosts& hosts) {
  Schedule rounds = algorithm.rounds(c, hosts);
  if (c.pre != 1.0) {
    // Only allreduce has an output as large as its input; all of its algorithms work in place.
    const Place loaded = c.kind == Kind::allreduce ? Place{kOutput, 0} : Place{kScratch, scratch_count(rounds)};
    int64_t count = 0;
    for (auto& round : rounds)
      for (Step& step : round)
        if (step.reads() && step.from.memory == kInput) {
          count = std::max(count, step.from.offset + step.count);
          step.from = {loaded.memory, loaded.offset + step.from.offset};
        }
    rounds.insert(rounds.begin(), {Step::copy({kInput, 0}, loaded, count)});
  }
  mark_lendable(rounds, c.kind == Kind::allreduce);
  return rounds;
}

}  // namespace lightcc
