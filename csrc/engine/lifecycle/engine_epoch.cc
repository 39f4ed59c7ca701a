// How an engine's epoch ends: by shutdown here, by a peer that left, failed or died, or by an interrupt. What that
// means is decided in epoch_state.h; here stands where its events come from, and what the engine does about them.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "engine/engine_impl.h"
#include "net/health/failure_detector.h"

namespace lightcc {
namespace {

constexpr uint64_t kFlushNs = 1'000'000'000;  // the longest that shutdown tries to send what it owes
constexpr uint64_t kLookNs = 1'000'000, kPauseNs = 100'000'000;
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

bool Engine::Impl::pause() {
  for (uint64_t deadline = now_ns() + kPauseNs; !progress_lock_.try_lock(); sched_yield())
    if (stopping_ || now_ns() > deadline) return false;
  return true;
}

void Engine::Impl::close_in_child(bool paused) {
  if (watch_) watch_->close_in_child();
  peers_->close_in_child(paused);
}

std::unique_ptr<ProcessWatch> Engine::Impl::watch() {
  auto on_end = [this](int local) { peer_ended(peers_->ranks_on_this_host()[size_t(local)]); };
  HeartbeatSocket* heartbeats = peers_->heartbeats();
  if (!heartbeats) return std::make_unique<ProcessWatch>(peers_->local_ranks().take_pidfds(), on_end);
  heartbeats->set_callbacks({[this](int host) { host_lost(host); },
                             [this](int host) { host_spared(host); },
                             [this](int host) { host_unheard(host); },
                             [this](Code code, const std::string& cause) { remote_failure(code, cause); }});
  return std::make_unique<ProcessWatch>(
      peers_->local_ranks().take_pidfds(), on_end,
      ProcessWatch::Also{[heartbeats] { heartbeats->tick(now_ns()); }, kHeartbeatNs, heartbeats->answers_descriptor(),
                         [heartbeats] { heartbeats->take_answers(now_ns()); }});
}

void Engine::Impl::peer_ended(int rank) {
  health_events_.process_ended(rank);
  peers_->wake_urgently(peers_->rank());
}

void Engine::Impl::remote_failure(Code code, const std::string& text) {
  health_events_.ended_elsewhere({code, text});
  peers_->wake_urgently(peers_->rank());
}

void Engine::Impl::host_lost(int host) {
  health_events_.host_lost(host);
  peers_->wake_urgently(peers_->rank());
}

void Engine::Impl::host_spared(int host) const {
  log(Level::warning, "no heartbeat of " + peers_->name(peers_->topology().hosts[size_t(host)][0]) +
                          " has arrived for " + std::to_string(kDeadNs / 1'000'000'000) +
                          " s, but its host answers over TCP and is not taken for lost: UDP does not get through any "
                          "more. Is a firewall between the hosts new, or are they flooded with datagrams?");
}

void Engine::Impl::host_unheard(int host) {
  log(Level::warning, "no heartbeat of " + peers_->name(peers_->topology().hosts[size_t(host)][0]) +
                          " has arrived: UDP does not get through, or its address is wrong (LIGHTCC_IFACE). Until it "
                          "does, TCP may take minutes to notice that its host is lost; let UDP pass on the ports of "
                          "LIGHTCC_PORT_RANGE");
  health_events_.host_unheard(host);
  peers_->wake_urgently(peers_->rank());
}

// What the watching thread has learnt of other hosts.
void Engine::Impl::take_health_events() {
  progress_lock_.assert_held();
  const HealthEvents::OfHosts events = health_events_.take();
  for (int host : events.unheard)
    for (int rank : peers_->topology().hosts[size_t(host)]) peers_->probe(rank);
  for (int host : events.lost) {
    epoch_event::HostLost event{kDeadNs / 1'000'000'000, {}};
    for (int rank : peers_->topology().hosts[size_t(host)]) event.ranks.emplace_back(rank, peers_->name(rank));
    apply(event);
  }
  if (events.ended_elsewhere) apply(epoch_event::EndedElsewhere{*events.ended_elsewhere});
}

// Someone left, failed or died. A death is looked for first, since it may be why another rank has failed.
void Engine::Impl::look_at_peers() {
  progress_lock_.assert_held();
  peers_->own().alarm.exchange(0);  // and sees what was written before it
  peers_->own().awake_ns.store(now_ns(), std::memory_order_relaxed);
  if (epoch_.over()) return;
  take_health_events();
  if (epoch_.over()) return;
  for (auto& [id, group_engine] : group_engines_) group_engine->control_plane().expedite();
  for (int rank : peers_->ranks_on_this_host())
    if (rank != peers_->rank() && health_events_.has_process_ended(rank) &&
        peers_->header(rank).presence == Presence::here)
      apply(epoch_event::PeerDied{peers_->name(rank)});
  if (epoch_.over()) return;
  std::vector<int> leavers;
  for (int rank : peers_->ranks_on_this_host()) {
    Header& header = peers_->header(rank);
    if (rank == peers_->rank()) continue;
    if (header.presence == Presence::failed)
      apply(epoch_event::EndedElsewhere{{Code(header.cause_code), cause_of(header)}});
    if (header.presence == Presence::left && !epoch_.left.contains(rank)) leavers.push_back(rank);
  }
  if (epoch_.over()) return;
  auto earlier = [&](int a, int b) { return peers_->header(a).left_ns < peers_->header(b).left_ns; };
  std::sort(leavers.begin(), leavers.end(), earlier);
  for (int rank : leavers) {
    const std::string why = cause_of(peers_->header(rank));
    apply(epoch_event::PeerLeft{rank, why});
    for (auto& [id, group_engine] : group_engines_) group_engine->rank_left(rank, why);
    carry_out_effects();
  }
}

void Engine::Impl::suspect(const PeerSuspected& error) {
  progress_lock_.assert_held();
  const uint64_t patience_ns = peers_->all_local() ? kVerdictNs : kVerdictOfNetworkNs;
  if (!suspicion_) suspicion_ = {{error.code(), error.what()}, now_ns() + patience_ns};
}

void Engine::Impl::await_verdict(bool& moved) {
  progress_lock_.assert_held();
  for (auto& [id, group_engine] : group_engines_) moved |= group_engine->step_control_plane();
  carry_out_effects();
  if (epoch_.phase == EpochState::Phase::draining)
    apply(epoch_event::Stepped{false, false});  // by a peer that has left: that is why
  else if (now_ns() > suspicion_->until_ns)
    end_epoch(suspicion_->cause.code, suspicion_->cause.text);
  peers_->flush_and_wake();
}

void Engine::Impl::end_epoch(Code code, const std::string& text) { apply(epoch_event::OwnFailure{{code, text}}); }

// Ends what there is to end. EpochAction::leave is left to the caller.
EpochAction Engine::Impl::apply(const EpochEvent& event) {
  progress_lock_.assert_held();
  EpochTransition next = transition(std::move(epoch_), event, now_ns());
  epoch_ = std::move(next.state);
  if (next.action == EpochAction::end || next.action == EpochAction::end_and_tell)
    carry_out_end(next.action == EpochAction::end_and_tell);
  return next.action;
}

void Engine::Impl::carry_out_end(bool tell) {
  progress_lock_.assert_held();
  const auto [code, text] = epoch_.cause;
  Header& own = peers_->own();
  set_cause(own, code, text);
  own.presence = Presence::failed;
  // First out of reach of ranks that may still be writing, then tell.
  peers_->arena()->abandon();
  outputs_->close();
  inbox_.fail(epoch_.cause);
  peers_->end_links(Error(code, text));
  if (HeartbeatSocket* heartbeats = peers_->heartbeats()) heartbeats->announce_end(code, text, now_ns(), !tell);
  for (auto& [id, group_engine] : group_engines_) group_engine->end_nccl(0);
  launches_.finish(now_ns() + NcclLaunches::kAbortNs);
  for (auto& [id, group_engine] : group_engines_) group_engine->fail_all(code, text);
  carry_out_effects();
  if (RequestPtr join = join_) finish(join, code, join->title() + ": " + text);  // no group engine may have it any more
  ring_local_ranks();
}

void Engine::Impl::ring_local_ranks() {
  for (int rank : peers_->ranks_on_this_host())
    if (rank != peers_->rank()) peers_->wake_urgently(rank);
}

void Engine::Impl::abort(const std::string& cause) {
  while (!progress_lock_.try_lock()) {
    if (stopping_) return;  // shutdown keeps the progress lock
    sched_yield();
  }
  apply(epoch_event::Interrupted{cause});
  progress_lock_.unlock();
}

// What this rank has agreed to with others must reach them.
void Engine::Impl::flush() {
  progress_lock_.assert_held();
  for (uint64_t deadline = now_ns() + kFlushNs; now_ns() < deadline && !epoch_.over();) {
    bool waiting = false;
    for (auto& [id, group_engine] : group_engines_) waiting |= group_engine->flush();
    peers_->flush_and_wake();
    if (!waiting) break;
    sched_yield();
  }
}

// To other hosts; the ranks of this one see it.
void Engine::Impl::send_leave_message(const std::string& text) {
  progress_lock_.assert_held();
  if (peers_->all_local()) return;
  for (auto& [id, group_engine] : group_engines_) group_engine->control_plane().leave(text);
  flush();
}

// After an end in peace all that was sent has to arrive. After another one everybody has been told by a datagram; where
// none gets through, they hear the cause when they connect again.
void Engine::Impl::leave_network(bool failed, const Cancellation* cancellation) {
  progress_lock_.assert_held();
  const bool alone = peers_->heartbeats() && !peers_->heartbeats()->all_heard();
  const Deadline deadline(now_ns() + kFlushNs, cancellation);
  try {
    while (!deadline.over() && (failed ? alone : !peers_->finish_links())) {
      peers_->wait_for_network(kLookNs);
      peers_->step();
    }
  } catch (const Error&) {  // whoever is lost only now is nothing to a rank that leaves
  }
  peers_->close_links();
}

void Engine::Impl::shutdown(const std::string& reason, const Cancellation* cancellation) {
  if (!inbox_.close()) return;
  stopping_ = true;
  wake_engine_thread();
  peers_->wake_own_driver();
  thread_.join();
  while (!progress_lock_.try_lock()) sched_yield();  // and never given back
  end_epoch_on_error([&] {
    take_inbox();
    if (suspicion_ && !epoch_.over()) end_epoch(suspicion_->cause.code, suspicion_->cause.text);
    flush();
  });
  const bool unfinished = inbox_.in_flight() > 0;
  if (!unfinished && !epoch_.over()) {
    const uint64_t deadline_ns = now_ns() + NcclLaunches::kQueuedNs;
    for (auto& [id, group_engine] : group_engines_) group_engine->end_nccl(deadline_ns);
    launches_.finish(deadline_ns + NcclLaunches::kAbortNs);
  }
  const std::string text = leave_message(epoch_, reason);
  if (!unfinished && !epoch_.over()) end_epoch_on_error([&] { send_leave_message(text); });
  if (unfinished) {
    peers_->arena()->abandon();
    outputs_->close();
  }
  for (auto& [id, group_engine] : group_engines_)
    group_engine->fail_all(Code::shut_down, "lightcc has been shut down on this rank");
  carry_out_effects();
  end_epoch_on_error([&] { peers_->flush_and_wake(); });
  const bool leaves = apply(epoch_event::ShutDown{text, unfinished}) == EpochAction::leave;
  peers_->own().left_ns = now_ns();
  if (leaves) {
    set_cause(peers_->own(), Code::ok, text);
    peers_->own().presence = Presence::left;
  }
  ring_local_ranks();
  outputs_->close();
  leave_network(!leaves, cancellation);
  const auto left = [&](int rank) { return peers_->header(rank).presence != Presence::here; };
  auto& here = peers_->ranks_on_this_host();
  if (HeartbeatSocket* heartbeats = peers_->heartbeats(); heartbeats && std::all_of(here.begin(), here.end(), left))
    heartbeats->announce_end(Code::ok, "", now_ns());
  watch_.reset();
  timeline_->stop(now_ns());
}

}  // namespace lightcc
