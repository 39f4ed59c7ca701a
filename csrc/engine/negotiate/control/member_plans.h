// Every member's half of the learned fusion plans: holds each request of a plan until all of its bucket are there, and
// then announces the bucket. Messages in, messages out: no I/O, no clock, no threads. Invariants:
// 1. A request is announced once: by itself, or with its bucket.
// 2. Leaving a plan announces what it holds, and from then on each of its requests by itself. What has been announced
//    with a bucket counts as announced by itself when the coordinator ends the plan.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/negotiate/control/message.h"
#include "engine/negotiate/control/response_cache.h"

namespace lightcc {

class MemberPlans {
 public:
  using Messages = std::vector<UpMessage>;
  // The cache outlives it.
  MemberPlans(int member, ResponseCache& cache) : member_(member), cache_(cache) {}

  // Where a request belongs; plan 0: nowhere. Kept for a request that is submitted again as it is, it saves the search
  // and the comparison with what is remembered.
  struct Slot {
    uint64_t life = 0;                          // of the plan, which no other of this process has: other groups and
                                                // epochs have plans of the same number
    uint32_t plan = 0, bucket = 0, index = 0;
  };
  // What to send as this request of a set is submitted: its announcement, that of its bucket, or nothing as it is held.
  // One that is not as it was, or of another set, leaves its plan. set 0: none.
  Messages submit(const std::string& key, const Announcement&, int set, uint64_t now_ns, Slot* slot);
  bool has(const std::string& key) const { return slots_.contains(key); }
  bool holds() const { return held_ > 0; }
  Messages leave_with(const std::string& key);  // the plan of this request, if it holds any
  Messages leave_all();
  // Those that have held something for much longer than it took before: what they wait for does not come.
  Messages leave_stuck(uint64_t now_ns);

  void clear();                                 // all of its requests have ended, and nobody is told
  // A plan of a request that this member has meanwhile announced otherwise is left from the beginning.
  void begin(const Plan&);
  Messages end(const PlanEnded&);
  // The keys of the requests that run; all of them had been announced.
  const std::vector<std::string>& run(const BucketBatch&);

  std::string text() const;                     // a line a bucket, for people

 private:
  struct Bucket {
    std::vector<std::string> keys;
    std::vector<char> here;                     // by key
    size_t count = 0;                           // of them
    uint64_t since_ns = 0;                      // when the first came
    uint64_t usual_ns = 0;                      // how long it has taken from then until all were here, at most, of late
  };
  struct MemberPlan {
    uint64_t life;
    std::vector<Bucket> buckets;
    int set = 0;                                // of the first request that came to it
    bool left = false;
    bool holds() const;
  };
  void leave(MemberPlan&, Messages&);

  const int member_;
  ResponseCache& cache_;
  std::map<uint32_t, MemberPlan> plans_;        // by number, until they end
  std::unordered_map<std::string, Slot> slots_; // of those that were not left
  size_t held_ = 0;                             // requests
};

}  // namespace lightcc
