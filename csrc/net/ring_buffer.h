// A ring of records in shared memory with one writer and one or more readers; all see every record in order.
// The writer owns head and data, each reader its own tail; positions only grow. Both ends use the same
// sequence of record sizes, so a record that would wrap is moved to the ring's start by both alike.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "base/types.h"

namespace lightcc {

struct alignas(kLine) Cursor { std::atomic<uint64_t> at{0}; };

// Where a record of n bytes lies that is due at `at`.
inline uint64_t record_start(uint64_t at, size_t n, size_t capacity) {
  size_t to_end = capacity - at % capacity;
  return n <= to_end ? at : at + to_end;
}

class RingWriter {
 public:
  RingWriter(Cursor* head, std::byte* data, size_t capacity, std::vector<const Cursor*> tails)
      : head_(head), data_(data), capacity_(capacity), tails_(std::move(tails)), at_(head->at.load()) {}

  std::byte* reserve(size_t n) {  // n <= capacity / 2
    start_ = record_start(at_, round_up(n), capacity_);
    if (start_ + round_up(n) - slowest_ > capacity_) {
      slowest_ = start_;
      for (auto* tail : tails_) slowest_ = std::min(slowest_, tail->at.load(std::memory_order_acquire));
      if (start_ + round_up(n) - slowest_ > capacity_) return nullptr;
    }
    return data_ + start_ % capacity_;
  }
  void commit(size_t n) {
    at_ = start_ + round_up(n);
    head_->at.store(at_, std::memory_order_release);
  }

  size_t slowest_reader() const {  // index in tails
    const auto behind = [](const Cursor* a, const Cursor* b) { return a->at.load() < b->at.load(); };
    return size_t(std::min_element(tails_.begin(), tails_.end(), behind) - tails_.begin());
  }

 private:
  Cursor* head_;
  std::byte* data_;
  size_t capacity_;
  std::vector<const Cursor*> tails_;
  uint64_t at_, start_ = 0;
  uint64_t slowest_ = 0;  // a lower bound of every tail
};

class RingReader {
 public:
  RingReader(const Cursor* head, const std::byte* data, size_t capacity, Cursor* tail)
      : head_(head), data_(data), capacity_(capacity), tail_(tail), at_(tail->at.load()) {}

  const std::byte* peek(size_t n) {
    start_ = record_start(at_, round_up(n), capacity_);
    if (known_ < start_ + round_up(n)) {
      known_ = head_->at.load(std::memory_order_acquire);
      if (known_ < start_ + round_up(n)) return nullptr;
    }
    return data_ + start_ % capacity_;
  }
  void consume(size_t n) {
    at_ = start_ + round_up(n);
    tail_->at.store(at_, std::memory_order_release);
  }

 private:
  const Cursor* head_;
  const std::byte* data_;
  size_t capacity_;
  Cursor* tail_;
  uint64_t at_, start_ = 0;
  uint64_t known_ = 0;  // a lower bound of head
};

}  // namespace lightcc
