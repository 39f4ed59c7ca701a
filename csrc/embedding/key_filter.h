// Counts of keys in a fixed size: a counting Bloom filter, which may count a key too high and never too low.
//
// Sources: Bloom 1970; counters in place of bits, Fan et al. 2000; an update raises only those counters that are below
// the new count ("conservative update"), Estan and Varghese 2002; all counters of a key in one cache line, Putze et al.
// 2007.
//
// 1. Each of the 65,536 buckets of keys has lines of its own. So what a filter holds depends on the keys and their
//    counts alone, not on how many ranks share it, and a bucket that moves to another rank takes its counters along.
// 2. Counters of one update are raised to counts that were found before any of them rose: their order means nothing.
// 3. A cell is 32 bits of counters, by its number among those of all buckets.
// 4. A bucket has memory, a slot, while a counter of it is not zero, or when it is reserved.
// 5. A reader (lightcc_embedding_reader, a bit) has read a cell until it is set again.
#pragma once
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "embedding/owners.h"

namespace lightcc::embedding {

struct FilterShape {
  int64_t lines = 0;  // of a bucket, 64 bytes each; 0: there is no filter
  int hashes = 0;     // counters of a key
  int bits = 0;       // of a counter: 2, 4, 8 or 16
  bool operator==(const FilterShape&) const = default;
  int64_t cells() const { return lines * kLineCells; }  // of a bucket
  int64_t all_cells() const { return cells() * kBuckets; }
  static constexpr int kLineCells = 16;
};

class KeyFilter {
 public:
  static constexpr int kParts = 64, kMostHashes = 32;
  static constexpr int64_t kMostLines = 1 << 20;
  // The narrowest counters that hold counts below min_count, 0: none do.
  static int bits_for(uint32_t min_count);

  void set_shape(const FilterShape&);  // forgets all counts
  const FilterShape& shape() const { return shape_; }
  bool active() const { return shape_.lines > 0; }
  int64_t bucket_of_cell(int64_t cell) const { return cell / shape_.cells(); }

  uint32_t count(int64_t key) const;
  uint32_t cell(int64_t number) const;
  // After it, the counters of these keys, or these cells, can be set without failure, in any order. Throws
  // std::bad_alloc.
  void reserve(std::span<const int64_t> keys);
  void reserve_cells(std::span<const int64_t> numbers);
  void set_cell(int64_t number, uint32_t counters);
  // set(cell, counters) for what a key's counters must become to be at least `count`, one cell after the other.
  template <class Set> void raise(int64_t key, uint32_t count, Set set) const {
    at_counters(key, [&](int64_t number, int shift) {
      const uint32_t now = cell(number);
      if ((now >> shift & most()) < count) set(number, (now & ~(most() << shift)) | count << shift);
    });
  }
  void clear() { set_shape(FilterShape(shape_)); }

  // visit(cell, counters) for each that is not zero, of a part of the buckets; readers: only for those that one of them
  // has not read, 0: for all.
  template <class Visit> void each(int part, int readers, Visit visit) const {
    for (int64_t bucket = kBuckets / kParts * part; bucket < kBuckets / kParts * (part + 1); ++bucket) {
      const Line* lines = active() ? lines_of(bucket) : nullptr;
      for (int64_t line = 0; lines && line < shape_.lines; ++line) {
        for (unsigned rest = readers ? unread_of(bucket)[line].of(readers) : kAllCells; rest; rest &= rest - 1) {
          const int at = std::countr_zero(rest);
          if (lines[line].cells[at])
            visit(bucket * shape_.cells() + line * FilterShape::kLineCells + at, lines[line].cells[at]);
        }
      }
    }
  }
  void has_read(int64_t cell, int reader);  // one that is not zero
  void has_read_all(int reader);

  size_t bytes() const;
  int64_t keys(int64_t buckets) const;  // about how many of so many buckets have counts, from how few counters are zero

 private:
  static constexpr unsigned kAllCells = (1u << FilterShape::kLineCells) - 1;
  struct alignas(64) Line { uint32_t cells[FilterShape::kLineCells] = {}; };
  struct Unread {  // of a line: for each reader a bit for each cell that it has not read
    uint16_t of_reader[2] = {};
    unsigned of(int readers) const { return (readers & 1 ? of_reader[0] : 0u) | (readers & 2 ? of_reader[1] : 0u); }
    void forget(int readers, unsigned cells) {
      for (int i = 0; i < 2; ++i)
        if (readers >> i & 1) of_reader[i] &= uint16_t(~cells);
    }
  };
  struct Piece {  // of slots_per_piece() slots
    std::unique_ptr<Line[]> lines;
    std::unique_ptr<Unread[]> unread;
  };
  uint32_t most() const { return (1u << shape_.bits) - 1; }
  int64_t slots_per_piece() const;
  Line* lines_of(int64_t bucket) const;  // nullptr: all are zero
  Unread* unread_of(int64_t bucket) const;
  int used_counters(uint32_t counters) const;
  void take_slot(int64_t bucket);
  void give_slot_back(int64_t bucket);

  // visit(cell, shift of the counter in it), for each of a key's counters; some may be the same one.
  template <class Visit> void at_counters(int64_t key, Visit visit) const {
    const uint64_t hash = mix(uint64_t(key));
    const int64_t line = int64_t((hash & 0xffffffff) * uint64_t(shape_.lines) >> 32);
    const int64_t first = int64_t(bucket_of(hash)) * shape_.cells() + line * FilterShape::kLineCells;
    const int in_cell = 32 / shape_.bits;
    uint64_t places = mix(hash);
    for (int i = 0; i < shape_.hashes; ++i, places >>= 8) {
      if (i && i % 8 == 0) places = mix(hash + uint64_t(i));
      const int place = int(places & 0xff) % (in_cell * FilterShape::kLineCells);
      visit(first + place / in_cell, place % in_cell * shape_.bits);
    }
  }

  FilterShape shape_;
  std::vector<uint32_t> slots_;       // of each bucket, plus 1; 0: it has none, as all its counters are zero
  std::vector<uint32_t> used_cells_;  // of each bucket, those that are not zero
  std::vector<uint32_t> free_;        // slots
  std::vector<Piece> pieces_;
  int64_t used_counters_ = 0;
};

}  // namespace lightcc::embedding
