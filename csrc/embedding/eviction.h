// When a row is looked at, and whether it goes then.
//
// 1. Whether a row goes at a step depends on that step, its header, its key and its weights alone: ranks in any number
//    evict the same rows at the same steps.
// 2. A row waits in the list of the step at which it may go; what is trained meanwhile moves to a later list when that
//    step has come. So with ttl and count a step looks at no more rows than were trained in some step before; with l2
//    and asked, at one of `every` parts of all rows.
// 3. Rows are numbers in the lists. Who erases a row that is in a list, or puts rows in, calls forget(): the lists are
//    made anew at the next step, and the same rows go at the same steps as without.
#pragma once
#include <cstdint>
#include <map>
#include <vector>

#include "embedding/shard.h"

namespace lightcc::embedding {

enum class EvictionKind : int32_t { none, ttl, count, l2, asked };  // the values are part of the C API

struct EvictionRule {
  EvictionKind kind = EvictionKind::none;
  double a = 0, b = 0;  // steps; threshold and decay; threshold
  uint32_t every = 1;   // of l2 and asked
};

// The first step after `now` at which the row may go.
uint32_t due_step(const EvictionRule&, const RowHeader&, uint32_t now);
// Whether a row that is due goes; a rule that asks Python decides it there. norm: that of its weights, for l2.
bool goes(const EvictionRule&, const RowHeader&, double norm, uint32_t now);

class Eviction {
 public:
  void set_rule(const EvictionRule& rule) { rule_ = rule, forget(); }
  const EvictionRule& rule() const { return rule_; }
  bool active() const { return rule_.kind != EvictionKind::none; }

  void forget() { known_ = false, waiting_.clear(), due_.clear(); }
  void born(const Shard& shard, uint32_t row) { if (active() && known_) wait(shard, row, shard.steps().now()); }
  // After a step: the keys of rows that go. asked: none, but due() has those to ask for.
  std::vector<int64_t> after_step(Shard&);
  const std::vector<uint32_t>& due() const { return due_; }
  // asked: which of due() go; the others wait again. Returns the keys of those that go.
  std::vector<int64_t> answer(const Shard&, const uint8_t* go);

 private:
  void wait(const Shard& shard, uint32_t row, uint32_t now) {
    waiting_[due_step(rule_, *shard.records().header(row), now)].push_back(row);
  }
  EvictionRule rule_;
  bool known_ = false;  // the lists have all rows
  std::map<uint32_t, std::vector<uint32_t>> waiting_;
  std::vector<uint32_t> due_;
};

}  // namespace lightcc::embedding
