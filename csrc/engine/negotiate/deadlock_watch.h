// A rank's part in finding deadlocks: between process sets (control/deadlock_detector.h) what it reports, what it
// answers, and what it does when both ranks have confirmed one; inside one (Coordinator::blocked) what it reports. Only
// whoever holds the progress lock calls it.
#pragma once
#include <string>

#include "engine/negotiate/blocked_state.h"
#include "engine/negotiate/process_sets.h"

namespace lightcc {

class DeadlockWatch {
 public:
  DeadlockWatch(const GroupResources&, ProcessSets&, Inbox&);  // which outlive it

  void note_blocked(const Request&, uint64_t now_ns);  // a caller waits for it for long, and is the only one
  void goes_on() { state_.unblock(); }                 // this rank does
  void finished(const Request&, Code, const std::string& text);

  void receive(const effect::WaitsFor& wait) { state_.waits_for(wait.group, wait.key, wait.ranks); }
  void receive(const DeadlockProbe& probe) { state_.add(probe); }

  bool step() {                                        // true if anything moved
    bool moved = state_.pending() && report();
    if (detector_.pending()) moved |= tell();
    return moved;
  }

 private:
  bool report();
  bool tell();
  void answer(const DeadlockProbe&);
  void declare_absent();

  const GroupResources& shared_;
  ProcessSets& sets_;
  Inbox& inbox_;
  DeadlockDetector& detector_;                         // which has something to tell on the world's coordinator only
  BlockedState state_;
};

}  // namespace lightcc
