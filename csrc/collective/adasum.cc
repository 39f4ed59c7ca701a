#include "collective/adasum.h"

#include "collective/fold.h"
#include "device/adasum.h"

namespace lightcc {
namespace {

int64_t dot_count(const Collective& c) { return int64_t(kDotProducts * c.tensors.size()); }

// Returns where the folded input lies.
Memory fold_in_adasum(Schedule& rounds, const Collective& c, const Fold& fold) {
  if (!fold.has_extra()) return kInput;
  const Place input{kInput, 0}, theirs{kScratch, 0};
  rounds.push_back({Step::recv_dot(c.index - 1, input, theirs, c.count)});
  rounds.push_back({Step::combine(c.index - 1, input, theirs, {kOutput, 0}, c.count, 0, false)});
  return kOutput;
}

Schedule alone(const Collective& c) { return {{Step::copy({kInput, 0}, {kOutput, 0}, c.count, true)}}; }

// Recursive doubling over the ranks that differ in the bits up to `mask`. A round may not write what it sends, so sums
// go from one slot to the other; returns the last one.
int64_t sum_dots(Schedule& rounds, const Collective& c, const Fold& fold, int mask) {
  int64_t at = 0;
  for (int m = 1; m <= mask; m *= 2) {
    const int peer = fold.rank(fold.index ^ m);
    const Place from{Memory::dots, at}, to{Memory::dots, dot_count(c) - at};
    rounds.push_back({Step::send(peer, from, dot_count(c)), Step::recv_reduce(peer, from, to, dot_count(c))});
    at = to.offset;
  }
  return at;
}

}  // namespace

Schedule adasum_whole(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c);
  const Fold fold(c);
  if (fold.index < 0) return folded_away(c);
  Schedule rounds;
  Place ours{fold_in_adasum(rounds, c, fold), 0};
  const Place theirs{kScratch, 0}, output{kOutput, 0};
  for (int mask = 1; mask < fold.power; mask *= 2) {
    const int peer = fold.rank(fold.index ^ mask);
    rounds.push_back({Step::send(peer, ours, c.count), Step::recv_dot(peer, ours, theirs, c.count)});
    rounds.push_back({Step::combine(peer, ours, theirs, output, c.count, 0, mask * 2 == fold.power)});
    ours = output;
  }
  fold_out(rounds, c, fold);
  return rounds;
}

Schedule adasum_halving(const Collective& c, const Hosts&) {
  if (c.size == 1) return alone(c);
  const Fold fold(c);
  if (fold.index < 0) return folded_away(c);
  std::vector<Halving> halvings;
  Schedule rounds;
  Memory ours = fold_in_adasum(rounds, c, fold);
  int64_t begin = 0, end = c.count;
  for (int mask = 1; mask < fold.power; mask *= 2) {
    const Halving& h = halvings.emplace_back(halve(fold, mask, begin, end));
    const Place mine{ours, h.keep}, theirs{kScratch, 0}, output{kOutput, h.keep};
    rounds.push_back(
        {Step::send(h.peer, {ours, h.give}, h.give_count), Step::recv_dot(h.peer, mine, theirs, h.keep_count)});
    const int64_t dots = sum_dots(rounds, c, fold, mask);
    rounds.push_back({Step::combine(h.peer, mine, theirs, output, h.keep_count, dots, mask * 2 == fold.power)});
    ours = kOutput;
    begin = h.keep;
    end = h.keep + h.keep_count;
  }
  for (auto h = halvings.rbegin(); h != halvings.rend(); ++h)
    rounds.push_back({Step::send(h->peer, {kOutput, h->keep}, h->keep_count),
                      Step::recv(h->peer, {kOutput, h->give}, h->give_count)});
  fold_out(rounds, c, fold);
  return rounds;
}

AdasumFactors adasum_factors(const double* dots) {
  const double aa = dots[0], ab = dots[1], bb = dots[2];
  return {aa == 0 ? 1 : 1 - ab / (2 * aa), bb == 0 ? 1 : 1 - ab / (2 * bb)};
}

}  // namespace lightcc
