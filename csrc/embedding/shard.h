// One rank's part of a table: the index, the records and the rule by which records take gradients. It knows of no rank.
//
// A record: header, weights, slots, and for checked keys 32 bits of the string's hash behind them.
// Functions for many keys work in groups: a group's buckets and then its records are asked for some groups before they
// are read, so that the memory answers many questions at once, and evenly.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "embedding/first_values.h"
#include "embedding/index.h"
#include "embedding/instructions.h"
#include "embedding/rules.h"
#include "embedding/undo_log.h"

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
  // Rows as they are after the present step, with what they have missed, which is not written to them.
  void read(std::span<const int64_t> keys, const Record* found, void* rows) const;
  // Both, and goes on with the growth of the index.
  void find_and_read(std::span<const int64_t> keys, const uint32_t* checks, Record* found, void* rows);
  // False: memory does not suffice for so many new rows.
  bool reserve(size_t rows);
  void reserve_logs(size_t rows);  // that a step will change. Throws std::bad_alloc
  double norm(uint32_t row) const;  // of its weights
  uint32_t row_of(int64_t key) const { return index_.find(key, mix(uint64_t(key)), records_); }
  void fill_first(int64_t key, int64_t i, void* rows) const;  // row i becomes the key's first value
  // One step, with one gradient a key and no key twice. Rows that are missing are born; they must have been reserved.
  // found is what find said since the last erase, and may lack rows that were born since.
  void update(std::span<const int64_t> keys, const uint32_t* checks, const Record* found, const void* gradients,
              const Numbers&);
  void erase(std::span<const int64_t> keys);
  void clear();
  Record insert(int64_t key, uint32_t check);  // a row as import fills it; the row of this key, if there is one

  // What has changed since begin_log; each log by itself.
  enum Log { of_commit, of_checkpoint };
  void begin_log(Log log) { logs_[log].begin(steps_, numbers_); }
  void end_log(Log log) { logs_[log].end(); }
  const UndoLog& log(Log log) const { return logs_[log]; }
  void go_back();  // to where of_commit began, which goes on from there
  void set_alphas(std::vector<double>);

  const RecordLayout& layout() const { return layout_; }
  const FirstValues& first_values() const { return first_; }
  void set_absent(const FirstValues& values) { absent_ = values; }
  const Slabs& records() const { return records_; }
  const Index& index() const { return index_; }
  Steps& steps() { return steps_; }
  const Steps& steps() const { return steps_; }
  Numbers& numbers() { return numbers_; }
  int64_t updates() const { return updates_; }  // in all, those that were taken back too
  uint64_t generation() const { return generation_; }  // another one: records were erased, and pointers are void

 private:
  bool is_logged() const { return logs_[0].active() || logs_[1].active(); }
  void before_changes(std::span<const Record>);  // nullptr is passed over
  void expect_check(Record, uint32_t check) const;
  // bytes: of the record that will be read.
  template <class Visit>
  void find_in_groups(std::span<const int64_t> keys, const uint32_t* checks, size_t bytes, Record* found,
                      Visit visit) const;
  LIGHTCC_ROW_INLINE Record asked_for(uint32_t row, size_t bytes) const {
    if (row == Slabs::kNone) return nullptr;
    const Record record = records_.at(row);
    ask_for(record, bytes);
    return record;
  }
  size_t bytes_to_read() const;  // from a record's beginning on, for a row
  // Replaces a guess that was wrong by the right record.
  void settle(int64_t key, uint64_t hash, Record& guessed) const {
    if (guessed && reinterpret_cast<const RowHeader*>(guessed)->key == key) return;
    const uint32_t row = index_.find(key, hash, records_);
    guessed = row == Slabs::kNone ? nullptr : records_.at(row);
  }

  RecordLayout layout_;
  FirstValues first_, absent_;  // of a row at birth; as a key without a row reads
  Slabs records_;
  Index index_;
  Steps steps_;
  Numbers numbers_;  // of the last update
  std::unique_ptr<Arithmetic> arithmetic_;
  UndoLog logs_[2];
  int64_t updates_ = 0;
  uint64_t generation_ = 0;
};

// What depends on the type of the numbers.
class Arithmetic {
 public:
  virtual ~Arithmetic() = default;
  // The memory of the records of read was asked for already; update asks by itself.
  virtual void read(std::span<const int64_t> keys, const Shard::Record* found, Shard::Record to) = 0;
  virtual void birth(Shard::Record, const Numbers&) = 0;
  virtual void update(std::span<const Shard::Record> rows, const void* gradients, const Numbers&, double alpha) = 0;
};
std::unique_ptr<Arithmetic> make_arithmetic(const RecordLayout&, const FirstValues& first, const FirstValues& absent,
                                            Steps&, const Numbers&, const Slabs&,
                                            Instructions = best_instructions());

}  // namespace lightcc::embedding
