#include "embedding/index.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace lightcc::embedding {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kFirstBuckets = 16;
constexpr uint8_t kSaturated = 255;

size_t most_keys(size_t buckets) { return buckets * IndexBucket::kPlaces * 5 / 6; }

}  // namespace

void Buckets::Free::operator()(IndexBucket* buckets) const {
  ::operator delete[](buckets, std::align_val_t(kHugePage));
}

Buckets::Buckets(size_t n) : count(n) {
  auto* memory = ::operator new[](n * sizeof(IndexBucket), std::align_val_t(kHugePage));
  if (n * sizeof(IndexBucket) >= kHugePage) madvise(memory, n * sizeof(IndexBucket), MADV_HUGEPAGE);
  of.reset(new (memory) IndexBucket[n]());
}

uint32_t Buckets::find(int64_t key, uint64_t hash, const Slabs& records) const {
  uint32_t found = Slabs::kNone;
  probe(hash, [&](const IndexBucket& bucket) {
    for (uint32_t fits = bucket.with(tag_of(hash)); fits; fits &= fits - 1) {
      const uint32_t row = bucket.rows[__builtin_ctz(fits)];
      if (records.header(row)->key != key) continue;
      found = row;
      return false;
    }
    return bucket.overflow != 0;
  });
  return found;
}

void Buckets::insert(uint64_t hash, uint32_t row) {
  probe(hash, [&](IndexBucket& bucket) {
    const uint32_t empty = bucket.with(0);
    if (empty) {
      const int place = __builtin_ctz(empty);
      bucket.tags[place] = tag_of(hash);
      bucket.rows[place] = row;
      return false;
    }
    if (bucket.overflow != kSaturated) ++bucket.overflow;
    return true;
  });
}

bool Buckets::erase(int64_t key, uint64_t hash, const Slabs& records) {
  const uint32_t row = find(key, hash, records);
  if (row == Slabs::kNone) return false;
  probe(hash, [&](IndexBucket& bucket) {
    for (uint32_t fits = bucket.with(tag_of(hash)); fits; fits &= fits - 1) {
      const int place = __builtin_ctz(fits);
      if (bucket.rows[place] != row) continue;
      bucket.tags[place] = 0;
      return false;
    }
    if (bucket.overflow != kSaturated) --bucket.overflow;
    return true;
  });
  return true;
}

Index::Index() : now_(std::make_unique<Buckets>(kFirstBuckets)) {}

// A growth that is under way ends first: three indexes would be too many.
bool Index::reserve(size_t keys, const Slabs& records) {
  if (size_ + keys <= most_keys(now_->count)) return true;
  try {
    size_t count = now_->count;
    while (size_ + keys > most_keys(count)) count *= 2;
    auto larger = std::make_unique<Buckets>(count);
    if (before_) move_slice(before_->count, records);
    before_ = std::exchange(now_, std::move(larger));
    moved_ = 0;
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void Index::insert(uint64_t hash, uint32_t row) {
  now_->insert(hash, row);
  ++size_;
}

bool Index::erase(int64_t key, uint64_t hash, const Slabs& records) {
  const bool erased = now_->erase(key, hash, records) || (before_ && before_->erase(key, hash, records));
  size_ -= erased;
  return erased;
}

void Index::move_slice(size_t buckets, const Slabs& records) {
  if (!before_) return;
  const size_t end = std::min(before_->count, moved_ + buckets), ahead = 2;
  for (; moved_ < end; ++moved_) {
    if (moved_ + ahead < before_->count) {
      const IndexBucket& next = before_->of[moved_ + ahead];
      for (int i = 0; i < IndexBucket::kPlaces; ++i)
        if (next.tags[i]) __builtin_prefetch(records.header(next.rows[i]));
    }
    IndexBucket& bucket = before_->of[moved_];
    for (int i = 0; i < IndexBucket::kPlaces; ++i) {
      if (!bucket.tags[i]) continue;
      now_->insert(mix(uint64_t(records.header(bucket.rows[i])->key)), bucket.rows[i]);
      bucket.tags[i] = 0;
    }
  }
  if (moved_ == before_->count) before_.reset();
}

void Index::clear() {
  now_ = std::make_unique<Buckets>(kFirstBuckets);
  before_.reset();
  size_ = moved_ = 0;
}

}  // namespace lightcc::embedding
