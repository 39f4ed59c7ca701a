// The life of an epoch on one rank: a value, and a pure function that says what an event makes of it and what the
// engine has to do about it. No I/O, no clock, no threads. Invariants:
// 1. An epoch is running, then perhaps draining, and ends as failed or closed. It never goes back, and once it is over
//    (failed or closed) no event changes it any more.
// 2. Exactly one transition of an epoch asks for an action: the one that ends it.
// 3. The first cause holds. A draining epoch ends with the cause for which it drains, unless a death, a failure or an
//    interrupt comes before its end; that one is then the cause.
// 4. Draining always ends: when nothing is in flight here, when nothing has moved for kQuietNs, or after
//    kLongestDrainNs.
// 5. A rank that left in peace is never reported as lost.
// 6. The other hosts are told of an end unless another rank has told them before.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/error.h"

namespace lightcc {

inline constexpr uint64_t kQuietNs = 50'000'000, kLongestDrainNs = 1'000'000'000;

struct EpochCause {
  Code code = Code::ok;
  std::string text;
};

struct EpochState {
  enum class Phase {
    running,
    draining,  // a peer ended the epoch in peace: it had sent its part of all that it finished, and the other ranks
               // are there, so what it took part in can still be finished here
    failed,    // the epoch has ended with `cause`
    closed     // this rank has shut down with nothing in flight
  };

  std::string rank_name;            // this rank, for texts: "rank 1 (pid 17) on host h"
  Phase phase = Phase::running;
  EpochCause cause;                 // draining: with which the epoch will end; failed: with which it has ended
  bool told_elsewhere = false;      // another rank has told the other hosts that the epoch ends, and why
  uint64_t draining_since_ns = 0, moved_ns = 0;  // draining: since when, and when anything last moved
  std::set<int> left;               // ranks that left in peace
  std::string first_left;           // why the first of them left
  bool request_failed_by_leaving = false;  // a request of this rank has failed because a rank had left

  bool over() const { return phase == Phase::failed || phase == Phase::closed; }
};

namespace epoch_event {

struct PeerDied { std::string name; };                            // the process of a rank that had not left
struct HostLost { uint64_t silent_s; std::vector<std::pair<int, std::string>> ranks; };  // its ranks and their names
struct PeerLeft { int rank; std::string why; };                   // in peace
struct EndedElsewhere { EpochCause cause; };                      // another rank says so; shut_down: in peace
struct OwnFailure { EpochCause cause; };
struct Interrupted { std::string why; };
struct JoinFailed { EpochCause cause; };                          // join() was in flight and cannot succeed any more
struct RequestShutDown {};                                        // a request of this rank failed with Code::shut_down
struct Stepped { bool moved, work_in_flight; };                   // the engine has made a step
struct ShutDown { std::string leave_message; bool work_in_flight; };  // this rank shuts down

}  // namespace epoch_event

using EpochEvent =
    std::variant<epoch_event::PeerDied, epoch_event::HostLost, epoch_event::PeerLeft, epoch_event::EndedElsewhere,
                 epoch_event::OwnFailure, epoch_event::Interrupted, epoch_event::JoinFailed,
                 epoch_event::RequestShutDown, epoch_event::Stepped, epoch_event::ShutDown>;

enum class EpochAction {
  nothing,
  end,           // fail all that is in flight with `cause`; the other hosts know it already
  end_and_tell,  // the same, and tell the other hosts
  leave          // say that this rank has left in peace
};

struct EpochTransition {
  EpochState state;
  EpochAction action;
};
EpochTransition transition(EpochState, const EpochEvent&, uint64_t now_ns);

// What the others hear when this rank leaves for that reason. Where a request failed here because another rank had
// left, that one's reason comes with it: whoever hears of both should learn of the first.
std::string leave_message(const EpochState&, const std::string& reason);

}  // namespace lightcc
