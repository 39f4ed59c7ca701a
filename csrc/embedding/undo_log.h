// What a shard's rows were at a moment, as far as they have changed since: of each such row a copy of its record, and
// of each row that was born since its key. So a table can go back to that moment, or be written as it was then, without
// a copy of it.
//
// 1. A key is in the log once, by its first change; what becomes of its row afterwards adds nothing.
// 2. reserve() comes before the changes of a step, so that none of them can fail.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "embedding/noted_keys.h"
#include "embedding/steps.h"

namespace lightcc::embedding {

class UndoLog {
 public:
  explicit UndoLog(size_t record_bytes) : record_bytes_(record_bytes) {}

  void begin(const Steps&, const Numbers&);  // forgets what it has; this is the moment
  void end();
  bool active() const { return active_; }

  void reserve(size_t keys);               // for so many further keys. Throws std::bad_alloc
  void steps_change(const Steps&);         // before those of the past do
  void changes(const std::byte* record);   // before a row changes or goes
  void is_born(int64_t key) { noted_.note(key, kBorn); }
  bool has(int64_t key) const { return noted_.has(key); }

  // visit(key, record as it was; nullptr: there was none).
  template <class Visit> void each(Visit visit) const {
    for (size_t i = 0; i < keys(); ++i) visit(noted_.key(i), noted_.number(i) == kBorn ? nullptr : record(i));
  }
  size_t keys() const { return noted_.size(); }
  size_t records() const { return records_; }
  size_t bytes() const;
  std::vector<double> alphas_then(const Steps& now) const;
  const Numbers& numbers_then() const { return numbers_; }
  // The first key from the i-th on that has a record; behind the last there is none.
  size_t next_record(size_t i) const;
  const std::byte* record(size_t i) const { return at(noted_.number(i)); }

  static constexpr uint32_t kBorn = ~0u;

 private:
  static constexpr size_t kPieceRecords = 4096;
  const std::byte* at(uint32_t kept) const {
    return pieces_[kept / kPieceRecords].get() + kept % kPieceRecords * record_bytes_;
  }

  size_t record_bytes_;
  bool active_ = false;
  NotedKeys noted_;               // with the number of their record, or kBorn
  std::vector<std::unique_ptr<std::byte[]>> pieces_;  // of kPieceRecords records
  size_t records_ = 0;
  uint32_t steps_ = 0;            // of the moment, as numbers_
  Numbers numbers_;
  bool other_steps_ = false;      // those of the past have changed, and alphas_ has them
  std::vector<double> alphas_;
};

}  // namespace lightcc::embedding
