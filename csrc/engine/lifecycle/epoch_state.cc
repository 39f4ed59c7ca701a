#include "engine/lifecycle/epoch_state.h"

#include "base/text.h"

namespace lightcc {
namespace {

using namespace epoch_event;
using EpochPhase = EpochState::Phase;

constexpr size_t kReasonBytes = 300;  // why a rank leaves: short enough to stand in an error
const std::string kHasLeft = " has left", kAfter = kHasLeft + " after ";

EpochAction fail(EpochState& state, EpochCause cause) {
  state.phase = EpochPhase::failed;
  state.cause = std::move(cause);
  return state.told_elsewhere ? EpochAction::end : EpochAction::end_and_tell;
}

EpochAction drain(EpochState& state, const EpochCause& cause, uint64_t now_ns) {
  if (state.phase == EpochPhase::draining) return EpochAction::nothing;
  state.phase = EpochPhase::draining;
  state.cause = cause;
  state.draining_since_ns = state.moved_ns = now_ns;
  return EpochAction::nothing;
}

// One for each event, called only while the epoch is not over.

EpochAction apply(EpochState& state, const PeerDied& event, uint64_t) {
  return fail(state, {Code::peer_lost, event.name + " died"});
}

EpochAction apply(EpochState& state, const HostLost& event, uint64_t) {
  std::string names;
  for (const auto& [rank, name] : event.ranks)
    if (!state.left.contains(rank)) names += (names.empty() ? "" : ", ") + name;
  if (names.empty()) return EpochAction::nothing;
  return fail(state, {Code::peer_lost, "a host is lost, nothing was heard of it for " +
                                           std::to_string(event.silent_s) + " s: " + names});
}

EpochAction apply(EpochState& state, const PeerLeft& event, uint64_t) {
  if (state.first_left.empty()) state.first_left = event.why;
  state.left.insert(event.rank);
  return EpochAction::nothing;
}

EpochAction apply(EpochState& state, const EndedElsewhere& event, uint64_t now_ns) {
  state.told_elsewhere = true;
  return event.cause.code == Code::shut_down ? drain(state, event.cause, now_ns) : fail(state, event.cause);
}

// What the operating system refused, it refused to one rank; all hear to which.
EpochAction apply(EpochState& state, const OwnFailure& event, uint64_t) {
  const auto& [code, text] = event.cause;
  const bool names_no_rank = code == Code::internal && !text.starts_with("rank ");
  return fail(state, {code, names_no_rank ? state.rank_name + ": " + text : text});
}

EpochAction apply(EpochState& state, const Interrupted& event, uint64_t) {
  return fail(state, {Code::shut_down, event.why});
}

// A rank has left, so the world will never have joined, while process sets without it take this rank as joined: nobody
// can go on.
EpochAction apply(EpochState& state, const JoinFailed& event, uint64_t now_ns) {
  return drain(state, event.cause, now_ns);
}

EpochAction apply(EpochState& state, const RequestShutDown&, uint64_t) {
  if (!state.first_left.empty()) state.request_failed_by_leaving = true;
  return EpochAction::nothing;
}

EpochAction apply(EpochState& state, const Stepped& event, uint64_t now_ns) {
  if (state.phase != EpochPhase::draining) return EpochAction::nothing;
  if (event.moved) state.moved_ns = now_ns;
  const bool drained = !event.work_in_flight || now_ns - state.moved_ns > kQuietNs ||
                       now_ns - state.draining_since_ns > kLongestDrainNs;
  return drained ? fail(state, state.cause) : EpochAction::nothing;
}

// Others wait for what a rank with work in flight will not send any more, or for each other because of it: that ends
// the epoch. A rank that leaves with nothing in flight has sent all that anyone needs of it.
EpochAction apply(EpochState& state, const ShutDown& event, uint64_t) {
  if (event.work_in_flight) return fail(state, {Code::shut_down, event.leave_message + ", with work in flight"});
  state.phase = EpochPhase::closed;
  return EpochAction::leave;
}

}  // namespace

EpochTransition transition(EpochState state, const EpochEvent& event, uint64_t now_ns) {
  EpochAction action = EpochAction::nothing;
  if (!state.over()) action = std::visit([&](const auto& one) { return apply(state, one, now_ns); }, event);
  return {std::move(state), action};
}

std::string leave_message(const EpochState& state, const std::string& reason) {
  const std::string& name = state.rank_name;
  const std::string& first = state.first_left;
  if (!state.request_failed_by_leaving)
    return name + kHasLeft + " (" + std::string(truncate_utf8(reason, kReasonBytes)) + ")";
  const size_t after = first.find(kAfter);
  return name + kAfter + (after == first.npos ? first : first.substr(after + kAfter.size()));
}

}  // namespace lightcc
