// What is held back for a while, so that more travels together, and for how long: every such decision of the engine, as
// pure functions. There is no timer beside them: where nothing is in flight nothing is held back. Invariants:
// 1. Whatever is held goes on without anything else happening: when a batch ends, at the next step, or after a time.
// 2. What decides here what others see is the same on all members, or is one member's alone to decide.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lightcc::hold {

// ---- on a rank: a submission is left for the next step if it has fewer bytes than this and the last submission that
// made a step did so less than this time ago.
inline constexpr int64_t kBurstBytes = 64 << 10;
inline constexpr uint64_t kBurstNs = 50'000;
constexpr bool for_next_step(uint64_t since_step_ns, int64_t bytes) {
  return since_step_ns < kBurstNs && bytes < kBurstBytes;
}

// ---- on a coordinator: between hosts so many batches run at a time, that the next is copied and reduced on each host
// while this one crosses the network; on one host, where both would take the same cores, it is one.
inline constexpr size_t kBatchesBetweenHosts = 2;
// While a batch runs, ready requests gather for the next. When they have so many bytes they are enough, and batches are
// agreed on ahead of time: those that may run and one more.
inline constexpr int64_t kAgreedAheadBytes = 4 << 20;
constexpr bool for_next_batch(size_t in_flight, size_t may_run, int64_t ready_bytes) {
  return in_flight > may_run || (in_flight > 0 && ready_bytes < kAgreedAheadBytes);
}

// ---- on an aggregator: what has been held for so long passes as it is, since the coordinator can tell who is missing.
inline constexpr uint64_t kAggregatorNs = 100'000'000;

// ---- on a member: a bucket of a fusion plan is held until it is whole, but not for longer than this and four times as
// long as that took of late.
inline constexpr uint64_t kBucketNs = 300'000'000;
inline constexpr uint64_t kFirstUsualNs = 250'000'000;  // before it was ever whole
constexpr bool is_bucket_stuck(uint64_t held_ns, uint64_t usual_ns) {
  return held_ns > kBucketNs + 4 * (usual_ns > 0 ? usual_ns : kFirstUsualNs);
}

// ---- on the fast path: how long a rank that waits there is not refused by one that does something else. One that
// has announced something refuses at once, since others must know what it waits for. One that runs a batch is often
// done in a moment, and an idle one on another host may only come late.
inline constexpr uint64_t kBusyNs = 50'000, kIdleBetweenHostsNs = 100'000'000;
constexpr uint64_t refusal_ns(bool has_announced, bool runs_batch, bool between_hosts) {
  if (has_announced) return 0;
  return between_hosts && !runs_batch ? kIdleBetweenHostsNs : kBusyNs;
}

}  // namespace lightcc::hold
