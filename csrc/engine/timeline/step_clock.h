// When a step of training begins, by the names of the all-reduces alone: a step is what lies between two appearances of
// the same tensor, the anchor. No clock, no threads. Invariants:
// 1. The anchor has a name of the program's own; where tensors belong to sets (plan.h), it is one of these.
// 2. A tensor that appears twice while the anchor does not takes its place: that of a model which is trained no more.
#pragma once
#include <string>
#include <string_view>

namespace lightcc {

class StepClock {
 public:
  // An all-reduce of this name begins. set: of the request, 0: none.
  bool begins(std::string_view name, int set) {
    if (name == anchor_) {
      candidate_.clear();
      return true;
    }
    if (anchor_in_set_ && set == 0) return false;
    if (!anchor_.empty() && anchor_in_set_ == (set != 0) && name != candidate_) {
      if (candidate_.empty()) candidate_ = name;
      return false;
    }
    anchor_ = name;
    anchor_in_set_ = set != 0;
    candidate_.clear();
    return true;
  }

 private:
  std::string anchor_, candidate_;  // candidate: the first tensor behind the anchor's last appearance
  bool anchor_in_set_ = false;
};

}  // namespace lightcc
