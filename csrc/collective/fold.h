// How an algorithm that needs a power of two of ranks takes any number.
#pragma once
#include "collective/collective.h"
#include "collective/schedule.h"

namespace lightcc {

inline constexpr Memory kInput = Memory::input, kOutput = Memory::output, kScratch = Memory::scratch;

// The largest power of two ranks take part in an exchange by halves. Of the others, each rank of an odd
// number below 2 * extras combines its left neighbour's input with its own first and gives it the result at the end.
struct Fold {
  int power = 1, extras = 0;  // ranks that take part; pairs that are folded into one
  int index = -1;             // this rank's among them; -1 if it is folded away

  explicit Fold(const Collective& c) {
    while (power * 2 <= c.size) power *= 2;
    extras = c.size - power;
    if (c.index >= 2 * extras)
      index = c.index - extras;
    else if (c.index % 2 == 1)
      index = c.index / 2;
  }
  int rank(int i) const { return i < extras ? 2 * i + 1 : i + extras; }
  bool has_extra() const { return index >= 0 && index < extras; }
};

// One exchange by halves of what is left, [begin, end): what this rank keeps, and what it gives to its peer.
struct Halving {
  int peer;
  int64_t keep, keep_count, give, give_count;
};
inline Halving halve(const Fold& fold, int mask, int64_t begin, int64_t end) {
  const int peer = fold.rank(fold.index ^ mask);
  const int64_t middle = begin + (end - begin) / 2;
  return fold.index & mask ? Halving{peer, middle, end - middle, begin, middle - begin}
                           : Halving{peer, begin, middle - begin, middle, end - middle};
}

inline void fold_out(Schedule& rounds, const Collective& c, const Fold& fold) {
  if (fold.has_extra()) rounds.push_back({Step::send(c.index - 1, {Memory::output, 0}, c.count)});
}
inline Schedule folded_away(const Collective& c) {
  return {{Step::send(c.index + 1, {Memory::input, 0}, c.count)},
          {Step::recv(c.index + 1, {Memory::output, 0}, c.count)}};
}

}  // namespace lightcc
