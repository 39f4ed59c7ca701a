// Who has announced what, what may run, in which order and fused with what. Messages in, messages out: no I/O,
// no clock, no threads. Members are indices in the group; the coordinator is member 0.
//
// It also makes the learned fusion plans (plan.h): of each set of requests whose steps are alike. Invariants:
// 1. BucketReady says no more and no less than a cached request for each request of its bucket. So a plan may end at
//    any time: what members have said by it is then taken for those, and nothing is lost.
// 2. A plan ends when anything of its requests happens otherwise: a member announces one of them by itself, its set has
//    another request, a member joins or leaves, or it is said that one will not come.
// 3. Members hear of a plan's begin and end in the order of the batches. Of a plan that has ended words may still come
//    until each member has answered (PlanLeft); as long its requests keep their numbers.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/negotiate/control/fusion.h"
#include "engine/negotiate/control/lateness.h"
#include "engine/negotiate/control/message.h"
#include "engine/negotiate/control/plan.h"
#include "engine/negotiate/control/wait_cycle.h"

namespace lightcc {

// The text of the error about a name that two threads of this rank used at the same time.
std::string why_withdrawn(int rank);

class Coordinator {
 public:
  struct Limits { FusionLimits fusion; int cache_capacity; PlanCosts costs = {50e-6, 2e-10}; };
  // rank_of[i]: world rank of member i, for messages to people.
  Coordinator(std::vector<int> rank_of, Limits limits)
      : rank_of_(std::move(rank_of)),
        limits_(limits),
        lateness_(rank_of_.size()),
        costs_(limits.costs),
        joined_{std::vector<char>(rank_of_.size())},
        stale_(rank_of_.size()) {}

  // now_ns: for plans.
  void announce(int member, const std::string& key, Announcement, bool again = false, uint64_t now_ns = 0);
  // The request's key, or nullptr: its number has been given away.
  const std::string* announce_cached(int member, const CachedRequest&, uint64_t now_ns = 0);
  // The same for each request of the bucket, whose keys it returns.
  std::vector<std::string> announce_bucket(int member, const BucketReady&, uint64_t now_ns = 0);
  void plan_left(int member, uint32_t plan);
  // What the coordinator's own rank knows of a request: its set, and where its tensor lies in memory that ranks share
  // (0: not in such memory). Requests that lie side by side are put side by side in a batch, so that they run without
  // being copied together.
  void set_own(const std::string& key, uintptr_t address, int set = 0);
  // What all-reduces cost, until some have run.
  void expect_costs(PlanCosts costs) { costs_ = MeasuredCosts(costs); }
  // An all-reduce of so many bytes has taken so long.
  void note_cost(int64_t bytes, double seconds) { costs_.note(bytes, seconds); }
  // This member will announce nothing more: what waits for it fails, now and later.
  void member_left(int member, const std::string& why);
  // Fails a request that the absent members will never announce, on the others as each comes to it.
  void members_absent(const MembersAbsent&);
  // This member did not take the request when it was submitted there; it may come yet.
  void refused(int member, const std::string& key, const std::string& why);
  std::string refusal(int member, const std::string& key) const;  // why, or ""
  // Two threads of this member had the name at the same time: it is withdrawn from all (NameWithdrawn).
  void contended(int member, const std::string& key);
  void name_given_up(int member, const std::string& key);
  // What this member has announced first of all that still waits for others, or "".
  std::string waits_for(int member) const;
  // This member is blocked on the request, and announces nothing until it has it. Returns a cycle of such members that
  // wait for each other, once for each cycle, or nothing.
  std::vector<Wait> blocked(int member, const std::string& key);
  std::vector<int> missing(const std::string& key) const;  // members that have not announced it, but should
  // Members that have joined: what the others have announced is ready without them, until all have joined. That
  // becomes ready last, and ends it.
  std::vector<int> joined() const;

  const std::vector<uint64_t>& waited_ns() const { return lateness_.waited_ns(); }  // lateness.h

  int64_t ready_bytes() const { return ready_bytes_; }
  // What must not wait for others to gather: failures, plans, and buckets, which are complete.
  bool anything_urgent() const {
    return !failures_.empty() || !withdrawals_.empty() || !plan_messages_.empty() || !ready_buckets_.empty();
  }
  bool anything_ready() const { return !ready_.empty() || anything_urgent(); }
  // Everything ready, as messages that go to every member in this order.
  std::vector<DownMessage> take_messages();
  size_t plans() const { return plans_.size(); }  // also those that members have not left yet

 private:
  struct Entry {
    std::string key;
    std::vector<Announcement> what;    // by member
    std::vector<char> announced;       // by member
    std::vector<std::string> owed;     // by member: the failure that waits for its announcement
    std::vector<int32_t> absent;       // once it is ready: members that joined and have not announced it
    std::vector<int32_t> told_absent;  // when it last ran
    int count = 0, first_member = 0;   // members that announced it; the first of them, once it is ready
    uint64_t arrived_ns = 0;           // the last of them so far
    bool ready = false;
    bool known = false;              // all members remember it by its number
    bool fresh = true;               // someone announced it in full since it last ran
    uint32_t id = kNoId, generation = 0;
    uint64_t last_used = 0;
    uintptr_t address = 0;
    int set = 0;
    uint32_t plan = 0;               // which it belongs to, with the bucket in that; 0: to none
    uint32_t bucket = 0;
    int plans = 0;                   // that name it, also those that members have not left yet: so long it keeps its id
    const Announcement& announcement() const { return what[size_t(first_member)]; }
  };
  struct NumberedEntry {
    Entry* entry;
    uint32_t generation = 0;
  };
  struct JoinedMembers {
    std::vector<char> is;            // by member
    int count = 0, last = 0;
    void add(int member) { is[size_t(member)] = 1, ++count, last = member; }
    void clear() { std::fill(is.begin(), is.end(), 0), count = 0; }  // last: it stays known
  };
  struct PlannedBucket {
    std::vector<Entry*> entries;
    std::vector<char> announced;     // by member: by BucketReady
    int count = 0;
    uint64_t arrived_ns = 0;         // the last of them so far
    bool ready = false;
    uint64_t served = 0;             // batches
  };
  struct FusionPlan {
    std::vector<PlannedBucket> buckets;
    int set = 0;
    uint64_t last_used = 0;
    bool ended = false;
    std::vector<char> left;          // by member, once it has ended
  };
  Entry& entry(const std::string& key);
  void arrived(Entry&, int member);
  bool complete(const Entry&) const;
  void make_ready(Entry&);
  void join_if_due(Entry& join, int member);
  void reset(Entry&);
  bool is_withdrawn(const Entry&, int member) const;
  std::map<std::string, Wait> waits() const;
  void number(Entry&);
  std::string needs_the_absent(const Entry&) const;
  Response response(Entry&);
  ReadyRequest ready_request(const Entry&) const;
  FusionPlan& plan(uint32_t number);
  void learn(const Entry&);        // it may end a step by which a plan is due
  void make_plan(int set, StepRecord&);
  void end_plan(uint32_t number);
  void end_plan_of(const Entry&);
  void end_plans();
  void end_oldest_plan();
  void expand(PlannedBucket&);
  bool has_announced(const Entry&, int member) const;
  bool is_ready(const Entry&) const;

  std::vector<int> rank_of_;
  Limits limits_;
  std::unordered_map<std::string, Entry> entries_;   // pointers to values stay valid
  std::vector<NumberedEntry> by_id_;
  std::vector<Entry*> ready_;
  std::vector<Failure> failures_;
  std::vector<NameWithdrawn> withdrawals_;
  std::map<std::string, std::vector<int>> unheard_;  // by key and member: its withdrawals that the member has not
                                                     // answered; until then what comes by it is of before
  std::map<uint32_t, FusionPlan> plans_;             // by number
  std::unordered_map<int, uint32_t> plan_of_;        // by set: the one that has not ended
  std::unordered_map<int, StepRecord> records_;      // by set
  std::vector<DownMessage> plan_messages_;
  std::vector<BucketBatch> ready_buckets_;
  uint32_t next_plan_ = 1;
  Lateness lateness_;                                // also the time of the last announcement
  MeasuredCosts costs_;
  int64_t ready_bytes_ = 0;
  uint64_t clock_ = 0;
  std::string first_left_;                           // why the first member left; empty: all are here
  JoinedMembers joined_;
  struct Refusal { int count = 0; std::string why; };
  std::map<std::string, std::vector<Refusal>> refused_;  // by key and member: since it last announced it
  struct {
    std::map<int, std::string> blocked_on;           // by member, until it announces something
    std::set<std::string> told;                      // keys of cycles that were found
  } cycles_;
  std::vector<int> stale_;                           // by member: cached requests whose number had been given away;
                                                     // each is followed by an announcement that says `again`
};

}  // namespace lightcc
