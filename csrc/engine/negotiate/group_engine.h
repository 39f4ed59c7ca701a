// One group at work: what its members agree on (negotiator.h), the batches that they run (run/batch_queue.h), the fast
// path past both (run/group_fast_path.h), and what two of them send each other (run/point_to_point.h). It calls nothing
// of the engine around it: what it wants done there are effects (effects.h). Only whoever holds the engine's progress
// lock calls it, once it is made.
#pragma once
#include "engine/negotiate/group_resources.h"
#include "engine/negotiate/negotiator.h"
#include "engine/run/point_to_point.h"

namespace lightcc {

class GroupEngine {
 public:
  // tuned: what the tuner finds, for later runs.
  GroupEngine(const GroupResources&, std::shared_ptr<const Group>, CacheFile tuned = {});

  const Group& group() const { return *group_; }
  const Selector& selector() const { return backends_.selector(); }
  Negotiator& negotiator() {
    shared_.progress_lock.assert_held();
    return negotiator_;
  }
  ControlPlane& control_plane() { return negotiator().control_plane(); }
  GroupFastPath& fast_path() { return fast_path_; }
  // Before anything was submitted: rules that go before others of all-reduces, and what these are taken to cost.
  void use_rules(std::span<const Rule> allreduces, PlanCosts);

  bool submit(const RequestPtr&);                       // false: one of its name is in flight here
  void note_facts(FastPathFacts*) const;                // of calls that would take the fast path
  bool receive_slots();                                 // of a call on it, from the network; true if anything moved

  bool step();                                          // a bounded piece of work; true if anything moved
  bool idle() const { return negotiator_.pending().empty() && queue_.size() == 0 && !fast_path_.request(); }
  bool watches_gpu() const { return queue_.watches_gpu(); }
  bool polls() const { return queue_.polls(); }

  // ---- what becomes of requests that others do not announce
  void rank_left(int rank, const std::string& why);     // a rank that left in peace
  void leave(const std::string& why);                   // this rank does: tells the members on other hosts
  void fail_all(Code, const std::string& text);         // everything in flight
  void end_nccl(uint64_t deadline_ns);                  // nccl_run.h
  // Is such a request of this rank in flight here?
  bool announced(Kind, bool automatic, const std::string& key) const;
  void inspect(uint64_t now_ns);                        // looks for stalls
  // This rank waits for nothing but this, for long. False: it is not what others must still announce.
  bool report_blocked(const std::string& key);
  void remind();                                        // those whom this rank waits for

 private:
  bool step_fast_path();
  bool step_point_to_point();
  void fail_agreed(Code, const std::string& text);      // and what is to be agreed on
  bool run_batches();
  void inspect_request(Request&, bool running, uint64_t now_ns);
  std::vector<int> silent_members(uint64_t now_ns) const;

  const GroupResources& shared_;
  const std::shared_ptr<const Group> group_;
  StallReporter stalls_;
  GroupBackends backends_;
  BatchQueue queue_;
  GroupFastPath fast_path_;
  Negotiator negotiator_;
  PointToPoint point_to_point_;
};

}  // namespace lightcc
