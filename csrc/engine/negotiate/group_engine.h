// One group at work: negotiates its requests, and has the batches run in the agreed order. It calls nothing of the
// engine around it: what it wants done there are effects (effects.h). Only whoever holds the engine's progress lock
// calls it, once it is made.
#pragma once
#include <unordered_map>

#include "base/config.h"
#include "engine/negotiate/control/control_plane.h"
#include "engine/negotiate/control/coordinator.h"
#include "engine/negotiate/control/member_plans.h"
#include "engine/negotiate/control/response_cache.h"
#include "engine/request/effects.h"
#include "engine/negotiate/left_members.h"
#include "engine/loop/progress_lock.h"
#include "engine/run/remote_fast_path.h"
#include "engine/run/batch_queue.h"
#include "engine/run/group_backends.h"
#include "engine/run/shared_fast_path.h"
#include "engine/negotiate/stall_reporter.h"
#include "engine/negotiate/surroundings.h"
#include "engine/negotiate/tuning.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

class GroupEngine {
 public:
  // The references outlive it. The memory and the launches are of all groups of this rank. tuned: what the tuner finds,
  // for later runs.
  GroupEngine(Peers&, std::shared_ptr<const Group>, const Config&, std::shared_ptr<OutputPool>,
              std::shared_ptr<PinnedPool>, Counters&, Tracing&, const ProgressLock&, NcclLaunches&, Effects&,
              const Surroundings&, CacheFile tuned = {});

  const Group& group() const { return *group_; }
  const Selector& selector() const { return backends_.selector(); }
  AutotuneChoices autotune_choices() const { return autotune_choices_; }  // of batches that are agreed on from now on
  // Before anything was submitted: rules that go before others of all-reduces, and what these are taken to cost.
  void use_rules(std::span<const Rule> allreduces, PlanCosts);
  bool submit(const RequestPtr&);                       // false: one of its name is in flight here

  // ---- the fast path
  FastPath& fast_path() { return *fast_path_; }
  // nullptr while a call may not begin on it: there is none, or something is in flight in this group.
  FastPath* idle_fast_path();
  bool can_take_fast_path(const Collective&) const;     // whether the backend is the one that it stands for
  bool receive_slots();                                 // of a call on it, from the network; true if anything moved
  bool is_withdrawn(Kind kind, const char* name) const {  // two threads of a rank had it at the same time
    return !withdrawn_.empty() && withdrawn_.contains(key_of(kind, name));
  }
  void adopt(const RequestPtr& request) {               // whose call is already on the fast path
    progress_lock_.assert_held();
    fast_path_request_ = request;
  }

  // ---- its work
  bool step();                                          // a bounded piece of work; true if anything moved
  bool step_control_plane();                            // of that, only messages
  void send_up(UpMessage);                              // to the coordinator
  void send_down(DownMessage);                          // on the coordinator: to all members, or to whom it is for
  bool flush();                                         // true while messages wait for room
  bool idle() const { return pending_.empty() && queue_.size() == 0 && !fast_path_request_; }
  bool watches_gpu() const { return queue_.watches_gpu(); }
  bool polls() const { return queue_.polls(); }
  ControlPlane& control_plane() { return control_plane_; }

  // ---- what becomes of requests that others do not announce
  void rank_left(int rank, const std::string& why);     // a rank that left in peace
  void fail_all(Code, const std::string& text);         // everything in flight
  void end_nccl(uint64_t deadline_ns);                  // nccl_run.h
  // Is such a request of this rank in flight here?
  bool announced(Kind, bool automatic, const std::string& key) const;
  // This rank will not announce it, but others have.
  void declare_absent(const std::string& key, const std::string& text) {
    send_up(MembersAbsent{key, text, {group_->index()}});
  }
  void refused(const std::string& key, const std::string& why) {  // by this rank, when it was submitted
    send_up(Refused{key, why, group_->index()});
  }
  void contended(const std::string& key);               // two threads of this rank had it at the same time
  // A caller waits for requests that a fusion plan may hold, and will not submit what they are held for.
  void leave_awaited_plans();
  void leave_stuck_plans(uint64_t now);
  std::string plans_text() const { return plans_.text(); }
  void inspect(uint64_t now);                           // looks for stalls
  // This rank waits for nothing but this, for long. False: it is not what others must still announce.
  bool report_blocked(const std::string& key);
  void remind();                                        // those whom this rank waits for

 private:
  using Pending = std::unordered_map<std::string, RequestPtr>;
  bool is_coordinator() const { return coordinator_ != nullptr; }
  void send_all_up(MemberPlans::Messages);
  void take_own_events();
  void receive(ControlEvent&);
  void receive(MemberMessage&);
  void receive(DownMessage&);
  void receive(ReceivedSlot&);
  void receive(const Departure&);
  void receive(Batch&);
  void receive(const BucketBatch&);
  void receive(const Failure&);
  void receive(const Missing&);
  void receive(const NameWithdrawn&);
  void check_world(int from) const;  // throws if this group is another
  bool is_among(const std::vector<int32_t>& members) const;  // this rank
  Pending::iterator find_pending(const std::string& key);
  void agree(std::vector<BatchItem>);
  void member_left(int member, const std::string& why, int from);
  void answer_queries();
  bool coordinate();
  bool run_batches();
  void note_done(const BatchQueue::DoneBatch&);
  bool step_fast_path();
  void finish(const RequestPtr&, Code, std::string text = {});
  void fail(const RequestPtr&, Code, const std::string& why);
  uint64_t waits_since(const Request&) const;
  void inspect_request(Request&, bool running, uint64_t now);
  std::vector<int> silent_members(uint64_t now) const;

  Peers& peers_;
  const std::shared_ptr<const Group> group_;
  const Config& config_;
  Counters& counters_;
  Tracing& tracing_;
  const ProgressLock& progress_lock_;
  Effects& effects_;
  StallReporter stalls_;

  ControlPlane control_plane_;
  ResponseCache response_cache_;
  MemberPlans plans_;
  std::unique_ptr<Coordinator> coordinator_;            // on member 0
  std::vector<Query> queries_;                          // to it
  Pending pending_;                                     // announced, not yet to run
  std::unordered_map<std::string, std::string> withdrawn_;  // keys that are refused until the next barrier, and why
  LeftMembers left_;

  GroupBackends backends_;
  std::unique_ptr<Tuning> tuning_;                      // on the world's coordinator, if there is one
  AutotuneChoices autotune_choices_ = 0;                // as the coordinator has said
  JoinedResiduals joined_residuals_;
  BatchQueue queue_;
  std::unique_ptr<FastPath> fast_path_;                 // if all share this host, or there are two
  RemoteFastPath* remote_fast_path_ = nullptr;          // the same, of two on different hosts
  RequestPtr fast_path_request_;                        // nullptr while its caller makes the steps itself
};

}  // namespace lightcc
