// When a step of training begins, by the names of the all-reduces alone: a step is what lies between two appearances of
// the same tensor, the anchor. No clock, no threads. Invariants:
// 1. The anchor has a name of the program's own; where tensors belong to sets (plan.h), it is one of these.
// 2. A tensor that appears twice while the anchor does not takes its place: that of a model which is trained no more.
//    One of no set takes that of one in a set only after kGivesWay times: the program may reduce a loss more often.
#pragma once
#include <string>
#include <string_view>

namespace lightcc {

class StepClock {
 public:
  static constexpr int kGivesWay = 100;
  static constexpr int kMostTensors = 4096;  // of a step, behind the anchor; one that comes more rarely is not followed

  // An all-reduce of this name begins. set: of the request, 0: none.
  bool begins(std::string_view name, int set) {
    if (name != anchor_ && !replaces_anchor(name, set)) return false;
    if (name != anchor_) anchor_ = name, anchor_in_set_ = set != 0;
    alike_.clear();
    outside_.clear();
    return true;
  }

 private:
  // How often one tensor has come since the anchor's last appearance.
  struct Follower {
    std::string name;
    int times = 0, others = 0;
    int count(std::string_view one) {
      if (times == 0 || others >= kMostTensors) name = one, times = others = 0;
      if (one != name) return ++others, 0;
      others = 0;
      return ++times;
    }
    void clear() { times = others = 0; }
  };
  bool replaces_anchor(std::string_view name, int set) {
    if (anchor_in_set_ && set == 0) return outside_.count(name) >= kGivesWay;
    return anchor_.empty() || anchor_in_set_ != (set != 0) || alike_.count(name) >= 2;
  }

  std::string anchor_;
  bool anchor_in_set_ = false;
  Follower alike_, outside_;  // in a set or not, as the anchor; and in none, while the anchor is in one
};

}  // namespace lightcc
