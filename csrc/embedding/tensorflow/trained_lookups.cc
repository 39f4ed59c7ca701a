#include "embedding/tensorflow/trained_lookups.h"

#include <random>
#include <utility>

#include "embedding/tensorflow/call_thread.h"

namespace lightcc::tf {

HeldCall::~HeldCall() { call_thread().drop(call_); }

// A rank must not take another's tokens for its own, as where a DistributedGradientTape has gathered them.
TrainedLookups::TrainedLookups() {
  constexpr int kOfOneProcess = 32;  // bits
  last_ = int64_t(uint64_t(std::random_device()() & INT32_MAX) << kOfOneProcess);
}

int64_t TrainedLookups::add(int64_t table, TrainedLookup lookup) {
  std::map<int64_t, TrainedLookup>& lookups = of_table_[table];
  lookups.emplace(++last_, std::move(lookup));
  if (lookups.size() > kMost) lookups.erase(lookups.begin());
  return last_;
}

const TrainedLookup* TrainedLookups::find(int64_t table, int64_t token) const {
  const auto lookups = of_table_.find(table);
  if (lookups == of_table_.end()) return nullptr;
  const auto found = lookups->second.find(token);
  return found == lookups->second.end() ? nullptr : &found->second;
}

void TrainedLookups::forget_until(int64_t table, int64_t token) {
  std::map<int64_t, TrainedLookup>& lookups = of_table_[table];
  lookups.erase(lookups.begin(), lookups.upper_bound(token));
}

TrainedLookups& trained_lookups() {
  static auto* lookups = new TrainedLookups;
  return *lookups;
}

}  // namespace lightcc::tf
