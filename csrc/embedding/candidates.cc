#include "embedding/candidates.h"

#include <algorithm>
#include <new>

namespace lightcc::embedding {
namespace {

constexpr size_t kFirstPlaces = 16;

size_t most_keys(size_t places) { return places - places / 8; }

}  // namespace

size_t KeyCounts::Stripe::place_of(int64_t key, uint64_t hash) const {
  size_t place = home(hash);
  while (entries[place].count && entries[place].key != key) place = next(place);
  return place;
}

void KeyCounts::Stripe::grow(size_t places) {
  std::vector<Entry> before(places, Entry{});
  before.swap(entries);
  for (const Entry& entry : before)
    if (entry.count) entries[place_of(entry.key, mix(uint64_t(entry.key)))] = entry;
}

uint32_t KeyCounts::count(int64_t key) const {
  const uint64_t hash = mix(uint64_t(key));
  const Stripe& stripe = stripes_[stripe_of(hash)];
  return stripe.used ? uint32_t(stripe.entries[stripe.place_of(key, hash)].count) : 0;
}

bool KeyCounts::reserve(std::span<const int64_t> keys) {
  size_t more[kStripes] = {};
  for (int64_t key : keys) more[stripe_of(mix(uint64_t(key)))] += count(key) == 0;
  try {
    for (int i = 0; i < kStripes; ++i) {
      Stripe& stripe = stripes_[i];
      size_t places = stripe.entries.size();
      while (stripe.used + more[i] > most_keys(places)) places = std::max(kFirstPlaces, places + places / 4);
      if (places != stripe.entries.size()) stripe.grow(places);
    }
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

void KeyCounts::set(int64_t key, uint32_t count) {
  const uint64_t hash = mix(uint64_t(key));
  Stripe& stripe = stripes_[stripe_of(hash)];
  Entry& entry = stripe.entries[stripe.place_of(key, hash)];
  const bool is_new = !entry.count;
  stripe.used += is_new;
  size_ += is_new;
  entry.key = key;
  entry.count = std::min(count, kMostCount) & kMostCount;
  entry.changed = Entry::kChanged;
}

// A later key may take the empty place unless its home is behind that place.
void KeyCounts::erase(int64_t key) {
  const uint64_t hash = mix(uint64_t(key));
  Stripe& stripe = stripes_[stripe_of(hash)];
  if (!stripe.used) return;
  size_t empty = stripe.place_of(key, hash);
  if (!stripe.entries[empty].count) return;
  for (size_t place = stripe.next(empty); stripe.entries[place].count; place = stripe.next(place)) {
    const size_t home = stripe.home(mix(uint64_t(int64_t(stripe.entries[place].key))));
    const bool stays = empty < place ? home > empty && home <= place : home > empty || home <= place;
    if (stays) continue;
    stripe.entries[empty] = stripe.entries[place];
    empty = place;
  }
  stripe.entries[empty] = Entry{};
  --stripe.used;
  --size_;
}

void KeyCounts::clear() {
  for (Stripe& stripe : stripes_) stripe = Stripe();
  size_ = 0;
}

size_t KeyCounts::bytes() const {
  size_t all = 0;
  for (const Stripe& stripe : stripes_) all += stripe.entries.size() * sizeof(Entry);
  return all;
}

void KeyCounts::has_read(int64_t key, int reader) {
  const uint64_t hash = mix(uint64_t(key));
  Stripe& stripe = stripes_[stripe_of(hash)];
  stripe.entries[stripe.place_of(key, hash)].changed &= ~uint32_t(reader);
}

void KeyCounts::has_read_all(int reader) {
  for (Stripe& stripe : stripes_)
    for (Entry& entry : stripe.entries) entry.changed &= ~uint32_t(reader);
}

}  // namespace lightcc::embedding
