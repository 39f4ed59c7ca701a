// How a vector is cut.
#pragma once
#include <cstdint>
#include <vector>

namespace lightcc {

// Consecutive parts of a memory, numbered modulo their number.
class Blocks {
 public:
  explicit Blocks(const std::vector<int64_t>& counts) : borders_(1, 0) {
    for (int64_t count : counts) borders_.push_back(borders_.back() + count);
  }
  Blocks(int64_t count, int parts) {
    for (int b = 0; b <= parts; ++b) borders_.push_back(count / parts * b + count % parts * b / parts);
  }
  // Numbered in another order: block b is the one that lies at place order[b].
  Blocks(const std::vector<int64_t>& counts, std::vector<int> order) : Blocks(counts) { order_ = std::move(order); }

  int64_t offset(int b) const { return borders_[at(b)]; }
  int64_t count(int b) const { return borders_[at(b) + 1] - borders_[at(b)]; }
  int64_t end(int b) const { return borders_[at(b) + 1]; }
  int64_t total() const { return borders_.back(); }

 private:
  size_t at(int b) const {
    const int parts = int(borders_.size()) - 1, number = (b % parts + parts) % parts;
    return size_t(order_.empty() ? number : order_[size_t(number)]);
  }
  std::vector<int64_t> borders_;
  std::vector<int> order_;
};

}  // namespace lightcc
