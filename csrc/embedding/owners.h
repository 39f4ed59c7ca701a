// Which rank owns a key: the top 16 bits of its hash name a bucket, and a map gives each bucket's rank.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "embedding/hash.h"

namespace lightcc::embedding {

inline constexpr int kBuckets = 1 << 16;
using Owners = std::vector<uint16_t>;  // kBuckets ranks

inline int owner_of(const Owners& owners, int64_t key) { return owners[bucket_of(mix(uint64_t(key)))]; }

// The owners in a new table: each rank gets as many buckets as any other, or one more.
Owners first_owners(int ranks);
// For `after` ranks: a bucket stays where it can, and ranks differ by one bucket at most. new_rank_of: of each rank
// before its number among those after, or -1.
Owners move_owners(const Owners&, std::span<const int32_t> new_rank_of, int after);

}  // namespace lightcc::embedding
