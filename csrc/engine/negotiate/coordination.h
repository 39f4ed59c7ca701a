// What member 0 of a group does beside what all do: it takes in what members announce, and tells all what runs, in
// which order and fused with what. What is to be told are return values. Only whoever holds the progress lock calls it.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/cache_file.h"
#include "engine/negotiate/control/control_plane.h"
#include "engine/negotiate/control/coordinator.h"
#include "engine/negotiate/stall_reporter.h"
#include "engine/negotiate/tuning.h"
#include "engine/run/batch_queue.h"
#include "engine/run/group_backends.h"

namespace lightcc {

// Throws if a message about what is between process sets has come in another group than the world's.
void check_is_world(const Group&, int from);

class Coordination {
 public:
  // Everything outlives it. tuned: what the tuner finds, for later runs; there is one in the world's, between hosts.
  Coordination(const GroupResources&, const Group&, const GroupBackends&, const StallReporter&, CacheFile tuned);

  Coordinator& decisions() { return decisions_; }
  void use_costs(PlanCosts);                       // until some all-reduces have run; the selector may have other rules
  std::optional<DownMessage> receive(MemberMessage&);  // what is to be told at once
  // Answers to what was asked, once all that came was taken in.
  std::vector<DownMessage> take_answers();
  // What is to run, if it need not gather, with so many batches in flight of which so many may run.
  std::vector<DownMessage> decide(size_t in_flight, size_t may_run);
  void note_done(const BatchQueue::DoneBatch&);

 private:
  const GroupResources& shared_;
  const Group& group_;
  const StallReporter& stalls_;
  Coordinator decisions_;
  std::unique_ptr<Tuning> tuning_;
  std::vector<Query> queries_;                     // not yet answered
};

}  // namespace lightcc
