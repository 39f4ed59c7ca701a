// One group at work: negotiates its requests and runs the batches in the agreed order. Only whoever holds the
// engine's progress lock calls it, once it is made.
#pragma once
#include <deque>
#include <unordered_map>

#include "base/config.h"
#include "collective/links.h"
#include "collective/nccl_hierarchical.h"
#include "engine/batch_execution.h"
#include "engine/control/control_plane.h"
#include "engine/control/coordinator.h"
#include "engine/control/member_plans.h"
#include "engine/control/response_cache.h"
#include "engine/remote_fast_path.h"
#include "engine/shared_fast_path.h"
#include "engine/effects.h"
#include "engine/joined_rank.h"
#include "engine/nccl_launches.h"
#include "engine/nccl_setup.h"
#include "engine/progress_lock.h"
#include "engine/surroundings.h"
#include "engine/tuning.h"
#include "net/group.h"
#include "net/peers.h"

namespace lightcc {

class GroupEngine {
 public:
  // tuned: what the tuner finds, for later runs.
  GroupEngine(Peers&, std::shared_ptr<const Group>, const Config&, std::shared_ptr<OutputPool>,
              std::shared_ptr<PinnedPool>, Counters&, Tracing&, const ProgressLock&, NcclLaunches&, Effects&,
              const Surroundings&, CacheFile tuned = {});

  const Group& group() const { return *group_; }
  const Selector& selector() const { return selector_; }
  AutotuneChoices autotune_choices() const { return autotune_choices_; }  // of batches that are agreed on from now on
  // Before anything was submitted: rules that go before others of all-reduces, and what these are taken to cost.
  void use_rules(std::span<const Rule> allreduces, PlanCosts);
  bool submit(const RequestPtr&);                       // false: one of its name is in flight here
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
  bool step();                                          // a bounded piece of work; true if anything moved
  bool step_control_plane();                            // of that, only messages
  void send_up(UpMessage);                              // to the coordinator
  void send_down(const DownMessage&);                   // on the coordinator: to all members, or to whom it is for
  void rank_left(int rank, const std::string& why);     // a rank that left in peace
  void fail_all(Code, const std::string& text);         // everything in flight
  // Is such a request of this rank in flight here?
  bool announced(Kind, bool automatic, const std::string& key) const;
  // This rank will not announce it, but others have.
  void declare_absent(const std::string& key, const std::string& text) {
    progress_lock_.assert_held();
    send_up(MembersAbsent{key, text, {group_->index()}});
  }
  void refused(const std::string& key, const std::string& why) {  // by this rank, when it was submitted
    progress_lock_.assert_held();
    send_up(Refused{key, why, group_->index()});
  }
  void contended(const std::string& key);               // two threads of this rank had it at the same time
  // A caller waits for requests that a fusion plan may hold, and will not submit what they are held for.
  void leave_awaited_plans();
  void leave_stuck_plans(uint64_t now);
  std::string plans_text() const { return plans_.text(); }
  bool idle() const { return pending_.empty() && batches_in_flight() == 0 && !fast_path_request_; }
  bool flush();                                         // true while messages wait for room
  void inspect(uint64_t now);                           // looks for stalls
  // This rank waits for nothing but this, for long. False: it is not what others must still announce.
  bool report_blocked(const std::string& key);
  bool watches_gpu() const { return gpu_is_busy_; }     // what was queued there may not have ended; step() looks
  bool polls() const;                                   // for what rings nobody: NCCL, and room in its stream
  // No collective is run by it any more. What was queued may end until the deadline; 0: it is aborted. Does not wait:
  // the NcclLaunches does.
  void end_nccl(uint64_t deadline_ns);
  void remind();                                        // those whom this rank waits for
  ControlPlane& control_plane() { return *control_plane_; }

 private:
  bool is_coordinator() const { return group_->index() == 0; }
  size_t batches_in_flight() const { return batches_.size() + running_.size(); }
  size_t batches_at_a_time() const { return shared_ ? 1 : kBatchesBetweenHosts; }
  const std::vector<BatchItem>& oldest_batch() const { return running_.empty() ? batches_[0] : running_[0]->items(); }
  void select(std::span<const Rule> allreduces);
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
  void agree(std::vector<BatchItem>);
  void check_world(int from) const;  // throws if this group is another
  bool is_among(const std::vector<int32_t>& members) const;  // this rank
  void member_left(int member, const std::string& why, int from);
  bool coordinate();
  bool begin_batch();
  GpuWays ways_of(const std::vector<BatchItem>&);
  GpuWays next_stream();
  bool settles_nccl(const std::vector<BatchItem>&) const;
  bool takes_turn(const std::vector<BatchItem>&) const;
  bool settle_nccl(const Request&);
  bool is_gpu_full() const;
  void watch_gpu();
  void finish(const RequestPtr&, Code, std::string text = {});
  void fail(const RequestPtr&, Code, const std::string& why);
  void hand_back(const RequestPtr&, Code, std::string text = {});
  bool run_batches();
  bool step_fast_path();
  void all_joined(const BatchItem&);
  uint64_t waits_since(const Request&) const;
  void inspect_request(Request&, bool running, uint64_t now);
  void report_stall(Request&, const std::vector<int>& missing, const std::vector<int>& joined, const std::string& note,
                    uint64_t now);
  void report_deadlock(const std::vector<Wait>&);
  std::string note(const std::string& key, const std::vector<int>& missing);
  std::vector<int> silent_members(uint64_t now) const;
  std::string names(const std::vector<int>& members) const;
  std::string some_names(std::vector<int> members) const;  // the first of many

  Peers& peers_;
  const std::shared_ptr<const Group> group_;
  const Config& config_;
  const std::shared_ptr<OutputPool> outputs_;
  const std::shared_ptr<PinnedPool> pinned_;            // of all groups of this rank
  Counters& counters_;
  Tracing& tracing_;
  const ProgressLock& progress_lock_;
  NcclLaunches& launches_;                              // of all groups of this rank
  Effects& effects_;
  const Surroundings& surroundings_;

  std::unique_ptr<ControlPlane> control_plane_;
  std::vector<std::unique_ptr<Link>> links_;            // data
  ResponseCache response_cache_;
  MemberPlans plans_;
  std::unique_ptr<Coordinator> coordinator_;            // on member 0
  std::vector<Query> queries_;                          // to it
  std::unordered_map<std::string, RequestPtr> pending_; // announced, not yet to run
  std::unordered_map<std::string, std::string> withdrawn_;  // keys that are refused until the next barrier, and why

  std::vector<std::unique_ptr<Backend>> backends_;
  Selector selector_;                                   // among them
  std::unique_ptr<Tuning> tuning_;                      // on the world's coordinator, if there is one
  AutotuneChoices autotune_choices_ = 0;                    // as the coordinator has said
  int nodes_ = 0;                                       // hosts, or parts of one, as backends see them
  SharedBackend* shared_ = nullptr;                     // one of them: if all share this host
  FusionBuffer buffers_[kBatchesBetweenHosts];          // the second: of a batch that begins beside another
  int buffer_ = 0;                                      // of the batch that began last
  std::unique_ptr<Staging> staging_;                    // once a request of a GPU has run through the host
  NcclBackend* nccl_ = nullptr;                         // of the backends, connected once the members have settled
  NcclHierarchicalBackend* nccl_2d_ = nullptr;          // and this, if there are several nodes
  bool nccl_settled_ = false;                           // whether they use it
  std::unique_ptr<NcclSetup> nccl_setup_;               // while they do
  std::vector<NcclStream*> nccl_streams_;               // of launches_, one a communicator, and then never empty
  size_t nccl_stream_ = 0;                              // the next batch's
  std::unique_ptr<NcclCommunicators> communicators_;
  bool gpu_is_busy_ = false;                            // with what it was given by NCCL, when last looked at
  uint64_t watched_ns_ = 0;
  JoinedRank joined_rank_;
  JoinedResiduals joined_residuals_;
  std::deque<std::vector<BatchItem>> batches_;          // agreed, not begun
  std::deque<std::unique_ptr<BatchExecution>> running_; // in their order, in which they also end
  std::unique_ptr<FastPath> fast_path_;                 // if all share this host, or there are two
  RemoteFastPath* remote_fast_path_ = nullptr;          // the same, of two on different hosts
  RequestPtr fast_path_request_;                        // nullptr while its caller makes the steps itself
  uint64_t batch_ended_ns_ = 0;                         // when a batch last came to its end
  std::string first_left_;                              // why the first member left; empty: all are here
  std::vector<char> left_;                              // by member
};

}  // namespace lightcc
