// Keys in the order in which they were noted, each once, with a number.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace lightcc::embedding {

class NotedKeys {
 public:
  void clear();                              // keeps its memory
  void reserve(size_t more);                 // further keys, which can be noted without failure. Throws std::bad_alloc
  bool note(int64_t key, uint32_t number);   // false: it was there, and keeps its number
  bool has(int64_t key) const;

  size_t size() const { return keys_.size(); }
  int64_t key(size_t i) const { return keys_[i]; }
  uint32_t number(size_t i) const { return numbers_[i]; }
  size_t bytes() const;

 private:
  size_t place_of(int64_t key) const;  // where it is, or the empty place where it would be
  void grow(size_t keys);

  std::vector<int64_t> keys_;
  std::vector<uint32_t> numbers_;
  std::vector<uint32_t> places_;  // an open hash index: a place in keys_, plus 1; 0: empty
};

}  // namespace lightcc::embedding
