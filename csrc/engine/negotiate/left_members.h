// Which members of a group have left in peace.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace lightcc {

class LeftMembers {
 public:
  explicit LeftMembers(int members) : left_(size_t(members)) {}

  bool add(int member, const std::string& why) {  // false: it had left before
    if (std::exchange(left_[size_t(member)], 1)) return false;
    if (first_.empty()) first_ = why;
    return true;
  }
  bool any() const { return !first_.empty(); }
  const std::string& first() const { return first_; }  // why the first of them left

 private:
  std::vector<char> left_;  // by member
  std::string first_;
};

}  // namespace lightcc
