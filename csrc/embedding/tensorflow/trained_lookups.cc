#include "embedding/tensorflow/trained_lookups.h"

#include <sys/random.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "embedding/tensorflow/call_thread.h"

namespace lightcc::tf {

HeldCall::~HeldCall() { call_thread().drop(call_); }

// A rank must not take another's tokens for its own, as where a DistributedGradientTape has gathered them.
TrainedLookups::TrainedLookups() {
  constexpr int kOfOneProcess = 32;  // bits
  uint32_t drawn;  // not by std::random_device, which needs glibc 2.36 in this library
  if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn)
    throw std::system_error(errno, std::generic_category(), "drawing a number for lookups");
  last_ = int64_t(uint64_t(drawn & INT32_MAX) << kOfOneProcess);
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
