// One rank's part of a table: the index, the records and the rule by which records take gradients. It knows of no rank.
//
// A record: header, weights, slots, and for checked keys 32 bits of the string's hash behind them.
// Functions for many keys work in blocks: first all buckets are asked for, then all records, then they are read, so
// that the memory answers many questions at once.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "embedding/first_values.h"
#include "embedding/index.h"
#include "embedding/rules.h"

namespace lightcc::embedding {

struct RecordLayout {
  int64_t dim = 0;
  size_t number_bytes = 4;  // of float or double
  SparseRule rule;
  bool checked = false;
  size_t slot_offset(int slot) const;  // slot -1: the weights
  size_t check_offset() const;
  size_t record_bytes() const;         // a multiple of 16
};

class Arithmetic;

class Shard {
 public:
  Shard(const RecordLayout&, const FirstValues&, size_t limit_bytes);
  ~Shard();

  using Record = std::byte*;
  // nullptr where there is no row. Throws Error{invalid_argument} for a key whose check is another.
  void find(std::span<const int64_t> keys, const uint32_t* checks, Record* found) const;
  // Rows as they are after the present step. A training read writes what a row has missed to it first.
  void read(std::span<const int64_t> keys, const Record* found, bool training, void* rows);
  // Both, in pieces that stay in the cache in between.
  void find_and_read(std::span<const int64_t> keys, const uint32_t* checks, bool training, Record* found, void* rows);
  // False: memory does not suffice for so many new rows.
  bool reserve(size_t rows);
  // One step, with one gradient a key and no key twice. Rows that are missing are born; they must have been reserved.
  // found is what find said since the last erase, and may lack rows that were born since.
  void update(std::span<const int64_t> keys, const uint32_t* checks, const Record* found, const void* gradients,
              const Numbers&);
  void erase(std::span<const int64_t> keys);
  void clear();
  Record insert(int64_t key, uint32_t check);  // a row as import fills it; the row of this key, if there is one

  const RecordLayout& layout() const { return layout_; }
  const FirstValues& first_values() const { return first_; }
  const Slabs& records() const { return records_; }
  const Index& index() const { return index_; }
  Steps& steps() { return steps_; }
  const Steps& steps() const { return steps_; }
  Numbers& numbers() { return numbers_; }
  uint64_t generation() const { return generation_; }  // another one: records were erased, and pointers are void

 private:
  void expect_check(Record, uint32_t check) const;
  Record guess(uint64_t hash) const {
    const uint32_t row = index_.guess(hash);
    if (row == Slabs::kNone) return nullptr;
    const Record record = records_.at(row);
    __builtin_prefetch(record);
    __builtin_prefetch(record + 64);
    return record;
  }
  // Of a guess that was wrong, what is right.
  void settle(int64_t key, uint64_t hash, Record& guessed) const {
    if (guessed && reinterpret_cast<const RowHeader*>(guessed)->key == key) return;
    const uint32_t row = index_.find(key, hash, records_);
    guessed = row == Slabs::kNone ? nullptr : records_.at(row);
  }

  RecordLayout layout_;
  FirstValues first_;
  Slabs records_;
  Index index_;
  Steps steps_;
  Numbers numbers_;  // of the last update
  std::unique_ptr<Arithmetic> arithmetic_;
  uint64_t generation_ = 0;
};

// What depends on the type of the numbers.
class Arithmetic {
 public:
  virtual ~Arithmetic() = default;
  virtual void read(std::span<const int64_t> keys, const Shard::Record* found, Shard::Record to) = 0;
  virtual void catch_up(std::span<const Shard::Record> found) = 0;
  virtual void birth(Shard::Record, const Numbers&) = 0;
  virtual void update(std::span<const Shard::Record> rows, const void* gradients, const Numbers&, double alpha) = 0;
};
std::unique_ptr<Arithmetic> make_arithmetic(const RecordLayout&, const FirstValues&, Steps&, const Numbers&);

}  // namespace lightcc::embedding
