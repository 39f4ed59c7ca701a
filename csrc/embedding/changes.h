// The keys whose rows have gone since the last save or delta. Rows that have changed have a bit of their own.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace lightcc::embedding {

class Changes {
 public:
  // From now on keys are noted.
  void begin() { known_ = true, gone_.clear(); }
  // Memory stays within that of the rows: where more go than there are, a save of all rows is smaller than the delta.
  void note(std::span<const int64_t> keys, size_t rows) {
    constexpr size_t kFew = 1 << 16;
    if (!known_) return;
    if (gone_.size() + keys.size() > std::max(kFew, rows)) *this = {};
    else gone_.insert(gone_.end(), keys.begin(), keys.end());
  }
  bool known() const { return known_; }
  const std::vector<int64_t>& gone() const { return gone_; }

 private:
  bool known_ = false;
  std::vector<int64_t> gone_;
};

}  // namespace lightcc::embedding
