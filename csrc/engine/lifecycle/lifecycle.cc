#include "engine/lifecycle/lifecycle.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/text.h"
#include "net/health/failure_detector.h"

namespace lightcc {
namespace {

constexpr uint64_t kFlushNs = 1'000'000'000;  // the longest that shutdown tries to send what it owes
constexpr uint64_t kFinishLookNs = 1'000'000;
// So soon the watch of this host, or the network, names a rank that has died.
constexpr uint64_t kVerdictNs = 100'000'000, kVerdictOfNetworkNs = kDeadNs + 2 * kHeartbeatNs;

std::string cause_of(const Header& header) {
  return std::string(header.cause, strnlen(header.cause, sizeof header.cause));
}

void set_cause(Header& header, Code code, const std::string& text) {
  header.cause_code = int32_t(code);
  const std::string_view most = truncate_utf8(text, sizeof header.cause - 1);
  most.copy(header.cause, most.size());
  header.cause[most.size()] = 0;
}

}  // namespace

Lifecycle::Lifecycle(const GroupResources& shared, ProcessSets& sets, Inbox& inbox)
    : shared_(shared), peers_(shared.peers), sets_(sets), inbox_(inbox), health_events_(shared.peers.size()) {
  state_.rank_name = peers_.name(peers_.rank());
}

// ---- what the threads that watch the others learn

void Lifecycle::watch() {
  if (peers_.size() == 1) return;
  auto on_end = [this](int local) { peer_ended(peers_.ranks_on_this_host()[size_t(local)]); };
  HeartbeatSocket* heartbeats = peers_.heartbeats();
  if (!heartbeats) {
    watch_ = std::make_unique<ProcessWatch>(peers_.local_ranks().take_pidfds(), on_end);
    return;
  }
  heartbeats->set_callbacks({[this](int host) { host_lost(host); },
                             [this](int host) { host_spared(host); },
                             [this](int host) { host_unheard(host); },
                             [this](Code code, const std::string& cause) { ended_elsewhere(code, cause); }});
  watch_ = std::make_unique<ProcessWatch>(
      peers_.local_ranks().take_pidfds(), on_end,
      ProcessWatch::Also{[heartbeats] { heartbeats->tick(now_ns()); }, kHeartbeatNs, heartbeats->answers_descriptor(),
                         [heartbeats] { heartbeats->take_answers(now_ns()); }});
}

void Lifecycle::peer_ended(int rank) {
  health_events_.process_ended(rank);
  peers_.wake_urgently(peers_.rank());
}

void Lifecycle::ended_elsewhere(Code code, const std::string& text) {
  health_events_.ended_elsewhere({code, text});
  peers_.wake_urgently(peers_.rank());
}

void Lifecycle::host_lost(int host) {
  health_events_.host_lost(host);
  peers_.wake_urgently(peers_.rank());
}

void Lifecycle::host_spared(int host) const {
  log(Level::warning, "no heartbeat of " + peers_.name(peers_.topology().hosts[size_t(host)][0]) +
                          " has arrived for " + std::to_string(kDeadNs / 1'000'000'000) +
                          " s, but its host answers over TCP and is not taken for lost: UDP does not get through any "
                          "more. Is a firewall between the hosts new, or are they flooded with datagrams?");
}

void Lifecycle::host_unheard(int host) {
  log(Level::warning, "no heartbeat of " + peers_.name(peers_.topology().hosts[size_t(host)][0]) +
                          " has arrived: UDP does not get through, or its address is wrong (LIGHTCC_IFACE). Until it "
                          "does, TCP may take minutes to notice that its host is lost; let UDP pass on the ports of "
                          "LIGHTCC_PORT_RANGE");
  health_events_.host_unheard(host);
  peers_.wake_urgently(peers_.rank());
}

// ---- what has happened

// A death is looked for first, since it may be why another rank has failed.
void Lifecycle::look_at_peers() {
  peers_.own().alarm.exchange(0);  // and sees what was written before it
  peers_.own().awake_ns.store(now_ns(), std::memory_order_relaxed);
  if (!over()) take_health_events();
  if (!over()) take_failures();
  if (!over()) take_leavers();
}

void Lifecycle::take_health_events() {
  const HealthEvents::OfHosts events = health_events_.take();
  for (int host : events.unheard)
    for (int rank : peers_.topology().hosts[size_t(host)]) peers_.probe(rank);
  for (int host : events.lost) {
    epoch_event::HostLost event{kDeadNs / 1'000'000'000, {}};
    for (int rank : peers_.topology().hosts[size_t(host)]) event.ranks.emplace_back(rank, peers_.name(rank));
    apply(event);
  }
  if (events.ended_elsewhere) apply(epoch_event::EndedElsewhere{*events.ended_elsewhere});
}

void Lifecycle::take_failures() {
  sets_.for_each([](GroupEngine& group_engine) { group_engine.control_plane().expedite(); });
  for (int rank : peers_.ranks_on_this_host())
    if (rank != peers_.rank() && health_events_.has_process_ended(rank) &&
        peers_.header(rank).presence == Presence::here)
      apply(epoch_event::PeerDied{peers_.name(rank)});
  for (int rank : peers_.ranks_on_this_host())
    if (const Header& header = peers_.header(rank); rank != peers_.rank() && header.presence == Presence::failed)
      apply(epoch_event::EndedElsewhere{{Code(header.cause_code), cause_of(header)}});
}

void Lifecycle::take_leavers() {
  std::vector<int> leavers;
  for (int rank : peers_.ranks_on_this_host())
    if (rank != peers_.rank() && peers_.header(rank).presence == Presence::left && !state_.left.contains(rank))
      leavers.push_back(rank);
  const auto earlier = [&](int a, int b) { return peers_.header(a).left_ns < peers_.header(b).left_ns; };
  std::sort(leavers.begin(), leavers.end(), earlier);
  for (int rank : leavers) {
    const std::string why = cause_of(peers_.header(rank));
    apply(epoch_event::PeerLeft{rank, why});
    sets_.for_each([&](GroupEngine& group_engine) { group_engine.rank_left(rank, why); });
  }
}

void Lifecycle::suspect(const PeerSuspected& error) {
  const uint64_t patience_ns = peers_.all_local() ? kVerdictNs : kVerdictOfNetworkNs;
  if (!suspicion_) suspicion_ = {{error.code(), error.what()}, now_ns() + patience_ns};
}

void Lifecycle::await_verdict() {
  if (state_.phase == EpochState::Phase::draining)
    apply(epoch_event::Stepped{false, false});  // by a peer that has left: that is why
  else if (now_ns() > suspicion_->until_ns)
    end(suspicion_->cause.code, suspicion_->cause.text);
}

void Lifecycle::stepped(bool moved, bool work_in_flight) {
  if (state_.phase == EpochState::Phase::draining) apply(epoch_event::Stepped{moved, work_in_flight});
}

EpochAction Lifecycle::apply(const EpochEvent& event) {
  shared_.progress_lock.assert_held();
  EpochTransition next = transition(std::move(state_), event, now_ns());
  state_ = std::move(next.state);
  if (next.action == EpochAction::end || next.action == EpochAction::end_and_tell)
    carry_out_end(next.action == EpochAction::end_and_tell);
  return next.action;
}

void Lifecycle::carry_out_end(bool tell) {
  const auto& [code, text] = state_.cause;
  Header& own = peers_.own();
  set_cause(own, code, text);
  own.presence = Presence::failed;
  // First out of reach of ranks that may still be writing, then tell.
  peers_.arena()->abandon();
  shared_.outputs->close();
  inbox_.fail(state_.cause);
  peers_.end_links(Error(code, text));
  if (HeartbeatSocket* heartbeats = peers_.heartbeats()) heartbeats->announce_end(code, text, now_ns(), !tell);
  sets_.end_nccl(0);
  shared_.launches.finish(now_ns() + NcclLaunches::kAbortNs);
  sets_.fail_all(code, text);
  if (const RequestPtr& join = sets_.joining())  // no group engine may have it any more
    shared_.effects.push(effect::Finish{join, code, join->title() + ": " + text});
  ring_local_ranks();
}

void Lifecycle::ring_local_ranks() {
  for (int rank : peers_.ranks_on_this_host())
    if (rank != peers_.rank()) peers_.wake_urgently(rank);
}

// ---- shutdown

void Lifecycle::settle() {
  if (suspicion_ && !over()) end(suspicion_->cause.code, suspicion_->cause.text);
  flush();
}

void Lifecycle::flush() {
  for (const uint64_t deadline = now_ns() + kFlushNs; now_ns() < deadline && !over(); sched_yield()) {
    bool waiting = false;
    sets_.for_each([&](GroupEngine& group_engine) { waiting |= group_engine.control_plane().flush(); });
    peers_.flush_and_wake();
    if (!waiting) break;
  }
}

void Lifecycle::end_nccl() {
  const uint64_t deadline_ns = now_ns() + NcclLaunches::kQueuedNs;
  sets_.end_nccl(deadline_ns);
  shared_.launches.finish(deadline_ns + NcclLaunches::kAbortNs);
}

// The ranks of this host see it.
void Lifecycle::tell_other_hosts(const std::string& leave_text) {
  if (peers_.all_local()) return;
  sets_.for_each([&](GroupEngine& group_engine) { group_engine.leave(leave_text); });
  flush();
}

void Lifecycle::fail_rest(bool unfinished) {
  if (unfinished) {
    peers_.arena()->abandon();
    shared_.outputs->close();
  }
  sets_.fail_all(Code::shut_down, "lightcc has been shut down on this rank");
}

void Lifecycle::leave(const std::string& leave_text, bool unfinished, const Cancellation* cancellation) {
  const bool leaves = apply(epoch_event::ShutDown{leave_text, unfinished}) == EpochAction::leave;
  peers_.own().left_ns = now_ns();
  if (leaves) {
    set_cause(peers_.own(), Code::ok, leave_text);
    peers_.own().presence = Presence::left;
  }
  ring_local_ranks();
  shared_.outputs->close();
  leave_network(!leaves, cancellation);
  const auto left = [&](int rank) { return peers_.header(rank).presence != Presence::here; };
  const auto& here = peers_.ranks_on_this_host();
  if (HeartbeatSocket* heartbeats = peers_.heartbeats(); heartbeats && std::all_of(here.begin(), here.end(), left))
    heartbeats->announce_end(Code::ok, "", now_ns());
  watch_.reset();
}

// After an end in peace all that was sent has to arrive. After another one everybody has been told by a datagram; where
// none gets through, they hear the cause when they connect again.
void Lifecycle::leave_network(bool failed, const Cancellation* cancellation) {
  const bool alone = peers_.heartbeats() && !peers_.heartbeats()->all_heard();
  const Deadline deadline(now_ns() + kFlushNs, cancellation);
  try {
    while (!deadline.over() && (failed ? alone : !peers_.finish_links())) {
      peers_.wait_for_network(kFinishLookNs);
      peers_.step();
    }
  } catch (const Error&) {  // whoever is lost only now is nothing to a rank that leaves
  }
  peers_.close_links();
}

}  // namespace lightcc
