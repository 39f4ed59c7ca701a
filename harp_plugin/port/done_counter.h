// Numbers packets in the order in which a port takes them, and counts how many of the first ones are all done.
#pragma once
#include <bit>
#include <cstdint>
#include <vector>

namespace harp {

class DoneCounter {
 public:
  // The next packet's number; it is under way until done().
  uint64_t add() {
    if (next_ - count_ == bits()) grow();
    return next_++;
  }
  // A packet that is done as soon as it is taken.
  void add_done() {
    const uint64_t number = add();
    if (number == count_) {
      ++count_;
    } else {
      mark(number);
    }
  }
  // Each number that add() gave once, in any order.
  void done(uint64_t number) {
    if (number != count_) {
      mark(number);
      return;
    }
    ++count_;
    while (count_ != next_ && word(count_) & bit(count_)) {
      word(count_) &= ~bit(count_);
      ++count_;
    }
  }
  uint64_t count() const { return count_; }
  uint64_t added() const { return next_; }

 private:
  uint64_t bits() const { return words_.size() * 64; }
  uint64_t& word(uint64_t number) { return words_[number / 64 & (words_.size() - 1)]; }
  static uint64_t bit(uint64_t number) { return uint64_t{1} << number % 64; }
  void mark(uint64_t number) { word(number) |= bit(number); }
  void grow() {  // the words keep their numbers' places modulo twice as many
    std::vector<uint64_t> old(words_.size() * 2);
    old.swap(words_);
    for (uint64_t number = count_; number != next_; ++number) {
      if (old[number / 64 & (old.size() - 1)] & bit(number)) mark(number);
    }
  }

  std::vector<uint64_t> words_ = std::vector<uint64_t>(64);  // a power of two; bits of count_..next_, done out of order
  uint64_t count_ = 0;
  uint64_t next_ = 0;
};

}  // namespace harp
