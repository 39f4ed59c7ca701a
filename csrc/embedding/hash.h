// From a key to 64 well-mixed bits. Owners read the top 16 bits, the index of a shard the others: so the keys of one
// rank, which share some of the top bits, still spread over all of its index.
#pragma once
#include <cstdint>

namespace lightcc::embedding {

// The finalizer of splitmix64 (Stafford's mix 13): a bijection, so no two keys have one hash.
inline uint64_t mix(uint64_t key) {
  key += 0x9e3779b97f4a7c15u;
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
  return key ^ (key >> 31);
}

inline uint32_t bucket_of(uint64_t hash) { return uint32_t(hash >> 48); }

struct StringHash { uint64_t key; uint32_t check; };
// Hashes to 128 bits: 64 are the key, and 32 of the others are the check.
StringHash hash_of(const char* text, uint64_t bytes);

}  // namespace lightcc::embedding
