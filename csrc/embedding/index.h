// Where a key's record is: an open hash index of buckets of one cache line, which hold tags and record numbers but no
// keys. One comparison of 16 bytes finds the places of a bucket whose tag fits, and the record's own key decides.
//
// 1. A key is in the bucket of its hash or, where that is full, in a later one of its probe sequence; each bucket it
// has
//    passed counts it in `overflow`. A search ends at the first bucket that nothing has passed.
// 2. Growth fills an index of twice the buckets in slices. Until it is whole, a key is in exactly one of the two.
// 3. A bucket of the old index keeps its counts of overflow after it is moved: searches of others go on through it.
#pragma once
#include <cstdint>
#include <cstddef>
#include <memory>
#include <span>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "embedding/hash.h"
#include "embedding/instructions.h"
#include "embedding/slabs.h"

namespace lightcc::embedding {

struct alignas(64) IndexBucket {
  static constexpr int kPlaces = 12;
  uint8_t tags[kPlaces];  // 0: empty
  uint8_t overflow;       // 255: that many or more, so that it is no longer lowered
  uint8_t unused[3];
  uint32_t rows[kPlaces];

  // A bit for each place with this tag.
  uint32_t with(uint8_t tag) const {
#if defined(__x86_64__)
    const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(tags));
    return uint32_t(_mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_set1_epi8(char(tag))))) & 0xfff;
#else
    uint32_t found = 0;
    for (int i = 0; i < kPlaces; ++i) found |= uint32_t(tags[i] == tag) << i;
    return found;
#endif
  }
};
static_assert(sizeof(IndexBucket) == 64);

inline uint8_t tag_of(uint64_t hash) { return uint8_t(hash >> 40) ? uint8_t(hash >> 40) : 1; }

// One array of buckets, a power of two.
struct Buckets {
  explicit Buckets(size_t count);
  struct Free { void operator()(IndexBucket*) const; };
  std::unique_ptr<IndexBucket[], Free> of;
  size_t count;

  IndexBucket& home(uint64_t hash) const { return of[hash & (count - 1)]; }
  // The step from bucket to bucket is odd, so it comes to all of them.
  static size_t step_of(uint64_t hash) { return 2 * size_t(tag_of(hash)) + 1; }
  IndexBucket& second(uint64_t hash) const { return of[(hash + step_of(hash)) & (count - 1)]; }
  template <class Visit> void probe(uint64_t hash, Visit visit) const {
    const size_t step = step_of(hash);
    size_t at = hash & (count - 1);
    for (size_t seen = 0; seen < count && visit(of[at]); ++seen) at = (at + step) & (count - 1);
  }
  uint32_t find(int64_t key, uint64_t hash, const Slabs& records) const;
  void insert(uint64_t hash, uint32_t row);
  bool erase(int64_t key, uint64_t hash, const Slabs& records);
};

class Index {
 public:
  Index();
  // The record's number, or Slabs::kNone.
  uint32_t find(int64_t key, uint64_t hash, const Slabs& records) const {
    const uint32_t row = now_->find(key, hash, records);
    return row == Slabs::kNone && before_ ? before_->find(key, hash, records) : row;
  }
  LIGHTCC_ROW_INLINE void prefetch(uint64_t hash) const { __builtin_prefetch(&now_->home(hash)); }
  // The number of the record that is most likely the key's, read from its bucket alone; kNone: search. What a search
  // will need then, or if the guess is wrong, is asked for.
  LIGHTCC_ROW_INLINE uint32_t guess(uint64_t hash, const Slabs& records) const {
    const IndexBucket& bucket = now_->home(hash);
    const uint32_t fits = bucket.with(tag_of(hash));
    if (!fits) {
      if (bucket.overflow) __builtin_prefetch(&now_->second(hash));
      return Slabs::kNone;
    }
    if (fits & (fits - 1)) __builtin_prefetch(records.header(bucket.rows[__builtin_ctz(fits & (fits - 1))]));
    return bucket.rows[__builtin_ctz(fits)];
  }

  // Of a key that guess had none for; the same from its second bucket.
  LIGHTCC_ROW_INLINE uint32_t second_guess(uint64_t hash) const {
    if (!now_->home(hash).overflow) return Slabs::kNone;
    const IndexBucket& bucket = now_->second(hash);
    const uint32_t fits = bucket.with(tag_of(hash));
    return fits ? bucket.rows[__builtin_ctz(fits)] : Slabs::kNone;
  }

  // After it, so many keys can be inserted without failure. False: memory does not suffice.
  bool reserve(size_t keys, const Slabs& records);
  void insert(uint64_t hash, uint32_t row);       // of a key that is not in it, and was reserved
  bool erase(int64_t key, uint64_t hash, const Slabs& records);
  void move_slice(size_t buckets, const Slabs& records);  // of growth, if there is any
  void clear();

  size_t size() const { return size_; }
  size_t bytes() const { return (now_->count + (before_ ? before_->count : 0)) * sizeof(IndexBucket); }
  bool growing() const { return before_ != nullptr; }

 private:
  size_t size_ = 0, moved_ = 0;  // moved_: buckets of before_ that are in now_
  std::unique_ptr<Buckets> now_, before_;
};

}  // namespace lightcc::embedding
