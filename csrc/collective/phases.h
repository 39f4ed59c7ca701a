// When the phases of a collective were, for a timeline. Phases may overlap; each begins with the first step in which it
// had something to do. A step is short, so its own begin and end are near enough.
#pragma once
#include <algorithm>
#include <string_view>

#include "base/clock.h"
#include "collective/collective.h"

namespace lightcc {

class PhaseTimes {
 public:
  explicit PhaseTimes(bool timed) : timed_(timed) {}
  void begin_step() {
    if (timed_) begun_ns_ = now_ns();
  }
  bool timed() const { return timed_; }
  // At the end of a step; name: of static life.
  void note(const char* name, bool has_begun, bool is_over) {
    if (!has_begun) return;
    const std::string_view wanted = name;
    const auto is_it = [&](const TimedPhase& one) { return one.name == wanted; };
    auto phase = std::find_if(phases_.begin(), phases_.end(), is_it);
    if (phase == phases_.end()) phase = phases_.insert(phase, TimedPhase{name, begun_ns_, 0});
    if (phase->end_ns == 0 && is_over) phase->end_ns = now_ns();
  }
  std::span<const TimedPhase> phases() const { return phases_; }  // those that have begun

 private:
  const bool timed_;
  uint64_t begun_ns_ = 0;
  std::vector<TimedPhase> phases_;
};

}  // namespace lightcc
