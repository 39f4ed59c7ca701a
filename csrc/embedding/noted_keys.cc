#include "embedding/noted_keys.h"

#include <algorithm>
#include <bit>

#include "embedding/hash.h"

namespace lightcc::embedding {

void NotedKeys::clear() {
  keys_.clear();
  numbers_.clear();
  std::fill(places_.begin(), places_.end(), 0);
}

size_t NotedKeys::place_of(int64_t key) const {
  size_t at = mix(uint64_t(key)) & (places_.size() - 1);
  while (places_[at] && keys_[places_[at] - 1] != key) at = (at + 1) & (places_.size() - 1);
  return at;
}

// At most half of the index is used.
void NotedKeys::grow(size_t keys) {
  if (keys * 2 <= places_.size()) return;
  places_.assign(std::bit_ceil(keys * 4), 0);
  for (size_t i = 0; i < keys_.size(); ++i) places_[place_of(keys_[i])] = uint32_t(i + 1);
}

void NotedKeys::reserve(size_t more) {
  const size_t all = keys_.size() + more;
  if (keys_.capacity() < all) keys_.reserve(all + all / 2);
  if (numbers_.capacity() < all) numbers_.reserve(all + all / 2);
  grow(all);
}

bool NotedKeys::has(int64_t key) const { return !places_.empty() && places_[place_of(key)]; }

bool NotedKeys::note(int64_t key, uint32_t number) {
  grow(keys_.size() + 1);
  const size_t at = place_of(key);
  if (places_[at]) return false;
  keys_.push_back(key);
  numbers_.push_back(number);
  places_[at] = uint32_t(keys_.size());
  return true;
}

size_t NotedKeys::bytes() const {
  return keys_.capacity() * sizeof(int64_t) + (numbers_.capacity() + places_.capacity()) * sizeof(uint32_t);
}

}  // namespace lightcc::embedding
