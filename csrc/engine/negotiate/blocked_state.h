// What one rank reports of itself: what its only waiting thread has been blocked on for long, and that it goes on, to
// the deadlock detector (control/deadlock_detector.h); and later to its process set (Coordinator::blocked), which
// answers for whom it waits.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/request/request.h"

namespace lightcc {

class BlockedState {
 public:
  explicit BlockedState(int rank) { report_.rank = rank; }

  // reports: to the deadlock detector, which has something to find if there are several process sets.
  void block(const Request& request, uint64_t now_ns, bool reports) {
    if (blocked()) return;
    report_.group = request.group;
    report_.kind = request.what.kind;
    report_.key = request.key;
    report_.missing.clear();
    report_.answers = probes_about_nobody_ = 0;
    automatic_ = request.automatic;
    ++report_.state;
    since_ns_ = now_ns;
    reports_ = reports;
    unreported_ = unreported_ || reports;
  }
  void unblock() {
    if (!blocked()) return;
    report_.group = -1;
    report_.kind = Kind::barrier;
    report_.key.clear();
    report_.missing.clear();
    ++report_.state;
    unreported_ = unreported_ || reports_;
    long_wait_ = LongWait::no;
  }
  // It is blocked on this request and still waits for it; after so long that is to be said in its process set, once.
  void waits(const Request& request, uint64_t now_ns, uint64_t long_ns) {
    if (report_.group != request.group || report_.key != request.key) return;
    if (long_wait_ == LongWait::no && now_ns - since_ns_ >= long_ns) long_wait_ = LongWait::due;
  }
  // Its process set's coordinator has said for whom it waits, which is reported too.
  void waits_for(int group, const std::string& key, std::vector<int32_t> ranks) {
    if (!reports_ || report_.group != group || report_.key != key) return;
    report_.missing = std::move(ranks);
    report_.answers = probes_about_nobody_;
    unreported_ = true;
  }
  // The deadlock detector wants to know once more for whom.
  void ask_again() {
    ++probes_about_nobody_;
    long_wait_ = LongWait::due;
  }
  bool long_wait_due() const { return long_wait_ == LongWait::due; }
  void long_wait_said() { long_wait_ = LongWait::said; }
  bool blocked() const { return report_.group >= 0; }
  bool blocked(uint32_t state) const { return blocked() && report_.state == state; }
  // What it is blocked on, while it is.
  int group() const { return report_.group; }
  Kind kind() const { return report_.kind; }
  bool automatic() const { return automatic_; }
  const std::string& key() const { return report_.key; }

  void add(const DeadlockProbe& probe) { probes_.push_back(probe); }
  bool pending() const { return unreported_ || !probes_.empty() || long_wait_due(); }
  std::optional<BlockedReport> take_report() {
    return std::exchange(unreported_, false) ? std::optional(report_) : std::nullopt;
  }
  std::vector<DeadlockProbe> take_probes() { return std::exchange(probes_, {}); }

  // It has said yes to a probe, and stands by that until the request that it is about has finished.
  struct Confirmation {
    BlockedReport report;
    bool automatic;
    DeadlockProbe probe;
    bool is_of(const Request& request) const { return report.group == request.group && report.key == request.key; }
  };
  void confirm(const DeadlockProbe& probe) { confirmation_ = Confirmation{report_, automatic_, probe}; }
  std::optional<Confirmation>& confirmation() { return confirmation_; }

 private:
  BlockedReport report_;
  bool automatic_ = false;
  uint64_t since_ns_ = 0;
  bool reports_ = false, unreported_ = false;
  enum class LongWait { no, due, said } long_wait_ = LongWait::no;
  uint32_t probes_about_nobody_ = 0;   // while it is blocked on this
  std::optional<Confirmation> confirmation_;
  std::vector<DeadlockProbe> probes_;  // not yet answered
};

}  // namespace lightcc
