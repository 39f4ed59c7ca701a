// Which keys get a row: those that have occurred min_count times in lookups that were trained, over all ranks.
//
// 1. A key is counted by the update that brings its gradient, and only if that is applied.
// 2. The update that brings a key's count to min_count makes its row, and the row takes that update's gradient. Before,
//    its gradients are dropped as if no rank had sent them.
// 3. Counts depend on keys alone, so that ranks in any number let in the same keys at the same steps.
// 4. Counts are exact (KeyCounts), or those of a filter of a fixed size (KeyFilter), which forgets no key. Either has
//    cells: a key and its count, or a piece of the filter. Each change of one passes through set(), which notes in the
//    logs what it was.
#pragma once
#include <span>
#include <utility>
#include <vector>

#include "embedding/candidates.h"
#include "embedding/key_filter.h"
#include "embedding/noted_keys.h"

namespace lightcc::embedding {

// What an update will do to a table's candidates.
struct Counted {
  std::vector<int64_t> keys;        // still candidates, with their counts after the update
  std::vector<uint32_t> counts;
  std::vector<int64_t> admitted;    // no candidates any more
};

// What cells were at a moment, as far as they have changed since.
struct CountLog {
  bool active = false;
  NotedKeys cells;
};

struct Admission {
  static constexpr int kLogs = 2;  // those of Shard::Log
  uint32_t min_count = 1;
  double absent = 0;   // what each element of a key without a row reads as
  KeyCounts candidates;
  KeyFilter filter;    // in their place, if it is active
  int64_t admitted = 0;
  CountLog logs[kLogs];
  bool counts() const { return min_count > 1; }

  uint32_t count(int64_t key) const { return filter.active() ? filter.count(key) : candidates.count(key); }
  bool reserve(const Counted&);  // before apply. False, or std::bad_alloc: memory does not suffice
  void apply(const Counted&);
  void forget(int64_t key);      // if the counts are exact
  void clear();
  void has_read_all(int reader);
  size_t bytes() const { return candidates.bytes() + filter.bytes(); }
  // buckets: those of this rank
  int64_t size(int64_t buckets) const { return filter.active() ? filter.keys(buckets) : int64_t(candidates.size()); }
  void set_shape(const FilterShape&);  // of the filter. Another one than before: counting begins anew

  bool is_cell(int64_t cell) const;    // of these counts
  uint32_t bucket_of_cell(int64_t cell) const;
  bool reserve(std::span<const int64_t> cells);  // before set
  void set(int64_t cell, uint32_t value);        // 0: there is none
  // visit(cell, value) for all of a part; readers: for those that one of them has not read.
  static constexpr int kParts = KeyCounts::kStripes;
  template <class Visit> void each(int part, int readers, Visit visit) const {
    if (filter.active()) filter.each(part, readers, visit);
    else candidates.each(part, readers, visit);
  }
  void has_read(int64_t cell, int reader);  // one that each() visits

  void begin_log(int log) { logs[log].active = true, logs[log].cells.clear(); }
  void end_log(int log) { logs[log] = CountLog(); }
  // To where a log began, which goes on from there. reserve_back comes before it, so that it cannot fail.
  bool reserve_back(int log);
  void go_back(int log);

 private:
  uint32_t value_of(int64_t cell) const { return filter.active() ? filter.cell(cell) : candidates.count(cell); }
  void note(int64_t cell);
  void reserve_logs(size_t cells);
};

static_assert(Admission::kParts == KeyFilter::kParts);

}  // namespace lightcc::embedding
