// Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021): an all-reduce that keeps
// what two vectors share and adds up what they do not. Of two vectors, with factors of their own for each tensor,
//   adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
// so equal vectors stay as they are and orthogonal ones are added. A vector of norm zero adds nothing; a NaN
// or a square beyond float64 makes the whole tensor NaN. Of more vectors it is a tree over neighbours: pairs of
// ranks, pairs of pairs, and so on. Where the number n of ranks is not a power of two, n - p pairs (p: the largest
// power of two in n) come first, ranks 0 and 1, 2 and 3, ...; the tree is over their results and the ranks left: for 5
// ranks adasum(adasum(adasum(0, 1), 2), adasum(3, 4)). Each level rounds to the collective's dtype.
#pragma once
#include "collective/collective.h"
#include "collective/hosts.h"
#include "collective/schedule.h"

namespace lightcc {

// Both give that tree, on all ranks the same bits; between each other they may differ in the last one.
// Whole vectors to rank XOR 1, 2, 4, ...: least start-ups.
Schedule adasum_whole(const Collective&, const Hosts&);
// Half of what is left to rank XOR 1, a quarter to XOR 2, ...; the dot products of the pieces are summed over the
// ranks that hold pieces of the same two vectors; then the way back: least bytes.
Schedule adasum_halving(const Collective&, const Hosts&);

// From the dot products a.a, a.b, b.b to the factors of a and b.
struct AdasumFactors {
  double a, b;
};
AdasumFactors adasum_factors(const double* dots);

}  // namespace lightcc
