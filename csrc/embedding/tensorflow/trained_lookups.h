// The lookups whose rows may get gradients, by the number (token) that TensorFlow's graph carries from a lookup to its
// update. Used by the call thread only.
#pragma once
#include <cstdint>
#include <map>
#include <memory>

#include "embedding/tensorflow/bound_table.h"

namespace lightcc::tf {

// A finished lookup. Tensors of its rows are in its memory and share it; so it may be dropped by any thread.
class HeldCall {
 public:
  explicit HeldCall(lightcc_embedding_call* call) : call_(call) {}
  ~HeldCall();
  HeldCall(const HeldCall&) = delete;
  lightcc_embedding_call* get() const { return call_; }

 private:
  lightcc_embedding_call* call_;
};

struct TrainedLookup {  // one table of it
  std::shared_ptr<HeldCall> call;
  int index = 0;
  int64_t padded = 0;  // its rows
};

class TrainedLookups {
 public:
  // As many of one table are kept as gradients may be added up for one update, without end if none comes.
  static constexpr size_t kMost = 64;
  TrainedLookups();

  int64_t add(int64_t table, TrainedLookup lookup);  // returns its token, which is above 0
  const TrainedLookup* find(int64_t table, int64_t token) const;
  void forget_until(int64_t table, int64_t token);   // this one and those before
  void forget(int64_t table) { of_table_.erase(table); }

 private:
  std::map<int64_t, std::map<int64_t, TrainedLookup>> of_table_;
  int64_t last_ = 0;
};

TrainedLookups& trained_lookups();

}  // namespace lightcc::tf
