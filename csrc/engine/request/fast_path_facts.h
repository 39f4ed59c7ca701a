// Which calls may take the fast path (run/fast_path.h): one rule over all that it depends on. Whoever learns some of it
// fills it in and asks; what is not known yet does not stand in the way, so it is asked again when more is known.
#pragma once
#include "base/types.h"

namespace lightcc {

struct FastPathFacts {
  // The call.
  bool blocks = true;               // its caller does nothing else until it is done
  Kind kind = Kind::allreduce;
  ReduceOp op = ReduceOp::sum;
  double pre = 1;
  int tensors = 1;
  DeviceKind device = DeviceKind::cpu;
  bool is_compressed = false;
  bool is_whole = true;             // a valid tensor with elements, and memory for its input and output
  bool has_name_free = true;        // nothing else has its name, and the name is not withdrawn

  // Its rank.
  int in_flight = 0;                // requests
  bool shows_negotiation = false;   // in a timeline
  bool epoch_ends = false;

  // Its group.
  bool has_fast_path = true;
  bool is_idle = true;              // nothing is in flight, all members are there, and no turn is open
  bool is_between_hosts = false;
  bool fixes_ways = false;          // LIGHTCC_SELECT or the tuner says how calls are run
  bool prefers_shared = true;       // the selector takes shared memory for it
};

// On one host the fast path does what the shared backend would do. Between hosts a small call has the bits that it has
// by negotiation, as only a factor before the sum is rounded in other places; of ways that are forced or tuned each
// call is to be one.
inline bool may_take_fast_path(const FastPathFacts& f) {
  const bool is_plain = f.blocks && f.kind == Kind::allreduce && f.op != ReduceOp::adasum && f.tensors == 1 &&
                        f.device == DeviceKind::cpu && !f.is_compressed && f.is_whole && f.has_name_free;
  const bool is_alone = f.in_flight == 0 && !f.shows_negotiation && !f.epoch_ends && f.has_fast_path && f.is_idle;
  const bool is_same = f.is_between_hosts ? f.pre == 1.0 && !f.fixes_ways : f.prefers_shared;
  return is_plain && is_alone && is_same;
}

}  // namespace lightcc
