// Which members of a group have left in peace.
#pragma once
#include <string>
#include <vector>

namespace lightcc {

class LeftMembers {
 public:
  explicit LeftMembers(int members) : why_(size_t(members)) {}

  bool add(int member, const std::string& why) {  // false: it had left before
    if (!why_[size_t(member)].empty()) return false;
    why_[size_t(member)] = why;
    if (first_.empty()) first_ = why;
    return true;
  }
  bool any() const { return !first_.empty(); }
  const std::string& first() const { return first_; }  // why the first of them left
  const std::string& why(int member) const { return why_[size_t(member)]; }  // "": it has not left
  int members() const { return int(why_.size()); }

 private:
  std::vector<std::string> why_;  // by member
  std::string first_;
};

}  // namespace lightcc
