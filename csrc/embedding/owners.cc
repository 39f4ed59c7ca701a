#include "embedding/owners.h"

#include <algorithm>
#include <numeric>

namespace lightcc::embedding {
namespace {

constexpr uint16_t kNobody = 0xffff;

// How many buckets each rank shall have: those that have most get the one that is over.
std::vector<int> shares_of(const std::vector<int>& had) {
  const int ranks = int(had.size());
  std::vector<int> order(had.size()), shares(had.size(), kBuckets / ranks);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return had[size_t(a)] > had[size_t(b)]; });
  for (int i = 0; i < kBuckets % ranks; ++i) ++shares[size_t(order[size_t(i)])];
  return shares;
}

}  // namespace

Owners first_owners(int ranks) { return move_owners(Owners(kBuckets, 0), std::vector<int32_t>{0}, ranks); }

Owners move_owners(const Owners& owners, std::span<const int32_t> new_rank_of, int after) {
  Owners moved(owners.size());
  std::vector<int> had(size_t(after), 0);
  for (size_t i = 0; i < owners.size(); ++i) {
    const int rank = owners[i] < new_rank_of.size() ? new_rank_of[owners[i]] : -1;
    moved[i] = rank < 0 || rank >= after ? kNobody : uint16_t(rank);
    if (moved[i] != kNobody) ++had[moved[i]];
  }
  std::vector<int> room = shares_of(had);
  for (uint16_t& rank : moved)
    if (rank != kNobody && room[rank]-- <= 0) rank = kNobody;
  int taker = 0;
  for (uint16_t& rank : moved) {
    if (rank != kNobody) continue;
    while (room[size_t(taker)] <= 0) ++taker;
    --room[size_t(taker)];
    rank = uint16_t(taker);
  }
  return moved;
}

}  // namespace lightcc::embedding
