// A queue that keeps its memory, up to a megabyte: once it has been as long as it usually gets, it allocates nothing.
#pragma once
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace lightcc {

template <class T> class Fifo {
 public:
  bool empty() const { return next_ == items_.size(); }
  template <class U> void push(U&& item) { items_.emplace_back(std::forward<U>(item)); }
  std::optional<T> pop() {  // nullopt: it is empty
    if (empty()) return std::nullopt;
    std::optional<T> item(std::move(items_[next_++]));
    if (empty()) {
      items_.clear();
      next_ = 0;
      if (items_.capacity() * sizeof(T) > kKeptBytes) items_.shrink_to_fit();
    }
    return item;
  }

 private:
  static constexpr size_t kKeptBytes = size_t{1} << 20;
  std::vector<T> items_;
  size_t next_ = 0;  // those before it were popped
};

}  // namespace lightcc
