// What one member agrees on with the others of its group: requests in, and batches out to the group's queue, in one
// order on all members. What is wanted elsewhere are effects (effects.h). Only whoever holds the progress lock calls
// it.
// Invariants:
// 1. A request that was submitted is pending until its batch is agreed on, or it has failed.
// 2. What this member tells itself, as the coordinator or by it, it knows before the call ends in which it was told.
// 3. A name that two threads of a rank had at the same time is withdrawn: refused until the group's next barrier.
#pragma once
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/negotiate/control/control_plane.h"
#include "engine/negotiate/control/member_plans.h"
#include "engine/negotiate/control/response_cache.h"
#include "engine/negotiate/coordination.h"
#include "engine/negotiate/left_members.h"
#include "engine/negotiate/stall_reporter.h"
#include "engine/request/effects.h"
#include "engine/request/inbox.h"
#include "engine/run/batch_queue.h"
#include "engine/run/group_fast_path.h"

namespace lightcc {

class Negotiator {
 public:
  using Pending = std::unordered_map<std::string, RequestPtr>;  // by key: announced, and not yet to run

  // Everything outlives it.
  Negotiator(const GroupResources&, const Group&, const GroupBackends&, BatchQueue&, GroupFastPath&,
             const StallReporter&, CacheFile tuned);

  bool submit(const RequestPtr&);                       // false: one of its name is in flight here
  bool take_messages();                                 // what has come; true if anything moved
  bool coordinate();                                    // on the coordinator; true if anything was agreed on
  void answer_queries();
  void send_up(UpMessage);                              // to the coordinator
  void send_down(DownMessage);                          // on the coordinator: to all members, or to whom it is for
  void note_done(const BatchQueue::DoneBatch&);
  void fail_pending(Code, const std::string& text);
  void member_left(int member, const std::string& why, int from);
  void contended(const std::string& key);               // two threads of this rank had it at the same time
  void refused(const Inbox::Refusal&);                  // by this rank, when it was submitted
  void leave_awaited_plans();
  void leave_stuck_plans(uint64_t now_ns);

  ControlPlane& control_plane() { return control_plane_; }
  const ControlPlane& control_plane() const { return control_plane_; }
  Coordinator* coordinator() { return coordination_ ? &coordination_->decisions() : nullptr; }
  Coordination* coordination() { return coordination_.get(); }
  const Pending& pending() const { return pending_; }
  const LeftMembers& left() const { return left_; }
  AutotuneChoices autotune_choices() const { return autotune_choices_; }
  bool is_withdrawn(Kind kind, const char* name) const {
    return !withdrawn_.empty() && withdrawn_.contains(key_of(kind, name));
  }
  std::string plans_text() const { return plans_.text(); }

 private:
  void send_all_up(MemberPlans::Messages);
  void take_own_events();
  void receive(ControlEvent&);
  void receive(MemberMessage&);
  void receive(DownMessage&);
  void receive(ReceivedSlot& slot) { fast_path_.receive(std::move(slot.bytes), slot.member); }
  void receive(const Departure&);
  void receive(Batch&);
  void receive(const BucketBatch&);
  void receive(const Failure&);
  void receive(const Missing&);
  void receive(const NameWithdrawn&);
  bool is_among(const std::vector<int32_t>& members) const;  // this rank
  // All members have announced it. response: what the coordinator says of it; nullptr: nothing new.
  RequestPtr take_pending(const std::string& key, const Response*);
  void agree(std::vector<BatchItem>);
  void choose_codec(Request&);
  void note_own(const Request&);
  void fail(const RequestPtr&, Code, const std::string& why);

  const GroupResources& shared_;
  const Group& group_;
  const int nodes_;
  BatchQueue& queue_;
  GroupFastPath& fast_path_;
  const StallReporter& stalls_;
  ControlPlane control_plane_;
  ResponseCache response_cache_;
  MemberPlans plans_;
  std::unique_ptr<Coordination> coordination_;          // on member 0
  Pending pending_;
  std::unordered_map<std::string, std::string> withdrawn_;  // keys, and why
  LeftMembers left_;
  AutotuneChoices autotune_choices_ = 0;                // as the coordinator has said: of batches from now on
  JoinedResiduals joined_residuals_;
};

}  // namespace lightcc
