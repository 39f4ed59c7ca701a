// Keys that are counted until they are let into a table: 12 bytes each, a key and how often it occurred.
//
// 1. A key is in the stripe that its hash names, in an open table with linear probing. A stripe grows by a quarter, by
//    itself: no insert moves more than one of 64 stripes.
// 2. A key that is taken out leaves no mark: those behind it move up.
// 3. A reader (lightcc_embedding_reader, a bit) has read a key until it is set again.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "embedding/hash.h"

namespace lightcc::embedding {

class KeyCounts {
 public:
  static constexpr int kStripes = 64;
  static constexpr uint32_t kMostCount = ~0u >> 2;

  uint32_t count(int64_t key) const;  // 0: the key is no candidate
  // After it, these keys can be set without failure. False: memory does not suffice.
  bool reserve(std::span<const int64_t> keys);
  void set(int64_t key, uint32_t count);  // at least 1; the key must have been reserved
  void erase(int64_t key);
  void clear();

  size_t size() const { return size_; }
  size_t bytes() const;
  // visit(key, count) for each of a stripe; readers: only for those that one of them has not read, 0: for all.
  template <class Visit> void each(int stripe, int readers, Visit visit) const {
    for (const Entry& entry : stripes_[stripe].entries)
      if (entry.count && (!readers || (int(entry.changed) & readers)))
        visit(int64_t(entry.key), uint32_t(entry.count));
  }
  void has_read(int64_t key, int reader);  // a key that is there
  void has_read_all(int reader);

 private:
#pragma pack(push, 4)
  struct Entry {
    int64_t key;
    uint32_t count : 30, changed : 2;  // count 0: an empty place. changed: the readers that have not read it
    static constexpr uint32_t kChanged = 3;
  };
#pragma pack(pop)
  static_assert(sizeof(Entry) == 12);
  struct Stripe {
    std::vector<Entry> entries;
    size_t used = 0;
    size_t home(uint64_t hash) const { return size_t((hash & 0xffffffff) * entries.size() >> 32); }
    size_t next(size_t place) const { return place + 1 < entries.size() ? place + 1 : 0; }
    size_t place_of(int64_t key, uint64_t hash) const;  // where it is, or the empty place where it would be
    void grow(size_t places);
  };
  static int stripe_of(uint64_t hash) { return int(hash >> 32 & (kStripes - 1)); }

  Stripe stripes_[kStripes];
  size_t size_ = 0;
};

}  // namespace lightcc::embedding
