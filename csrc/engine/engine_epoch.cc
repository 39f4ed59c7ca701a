// How an engine's epoch ends: by shutdown here, by a peer that left, failed or died, or by an interrupt.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/text.h"
#include "engine/engine.h"

namespace lightcc {
namespace {

// After a peer ended the epoch in peace: the end comes once nothing has moved for so long, or after so long in all.
constexpr uint64_t kQuietNs = 50'000'000, kLongestEndNs = 1'000'000'000;
constexpr uint64_t kFlushNs = 1'000'000'000;  // the longest that shutdown tries to send what it owes
constexpr uint64_t kLookNs = 1'000'000, kPauseNs = 100'000'000;

constexpr size_t kReasonBytes = 300;          // why a rank leaves: short enough to stand in an error
const std::string kHasLeft = " has left", kAfter = kHasLeft + " after ";

std::string cause_of(const Header& header) {
  return std::string(header.cause, strnlen(header.cause, sizeof header.cause));
}

void set_cause(Header& header, Code code, const std::string& text) {
  header.cause_code = int32_t(code);
  const std::string_view most = cut(text, sizeof header.cause - 1);
  most.copy(header.cause, most.size());
  header.cause[most.size()] = 0;
}

}  // namespace

bool Engine::pause() {
  for (uint64_t deadline = now_ns() + kPauseNs; progress_lock_.exchange(true); sched_yield())
    if (stopping_ || now_ns() > deadline) return false;
  return true;
}

void Engine::close_in_child(bool paused) {
  if (watch_) watch_->close_in_child();
  peers_->close_in_child(paused);
}

std::unique_ptr<ProcessWatch> Engine::watch() {
  auto on_end = [this](int local) { peer_ended(peers_->ranks_on_this_host()[size_t(local)]); };
  HeartbeatSocket* heartbeats = peers_->heartbeats();
  if (!heartbeats) return std::make_unique<ProcessWatch>(peers_->local_ranks().take_pidfds(), on_end);
  heartbeats->set_callbacks({[this](int host) { host_lost(host); },
                             [this](int host) { host_unheard(host); },
                             [this](Code code, const std::string& cause) { remote_failure(code, cause); }});
  return std::make_unique<ProcessWatch>(
      peers_->local_ranks().take_pidfds(), on_end, [heartbeats] { heartbeats->tick(now_ns()); }, kHeartbeatNs);
}

void Engine::peer_ended(int rank) {
  ended_[rank] = true;
  peers_->wake_urgently(peers_->rank());
}

void Engine::remote_failure(Code code, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!remote_failure_) remote_failure_ = Failure(code, text);
  }
  peers_->wake_urgently(peers_->rank());
}

void Engine::host_lost(int host) {
  {
    std::lock_guard lock(mutex_);
    lost_hosts_.push_back(host);
  }
  peers_->wake_urgently(peers_->rank());
}

void Engine::host_unheard(int host) {
  log(Level::warning, "no heartbeat of " + peers_->name(peers_->topology().hosts[size_t(host)][0]) +
                          " has arrived: UDP does not get through, or its address is wrong (LIGHTCC_IFACE). Until it "
                          "does, TCP may take minutes to notice that its host is lost; let UDP pass on the ports of "
                          "LIGHTCC_PORT_RANGE");
  {
    std::lock_guard lock(mutex_);
    unheard_hosts_.push_back(host);
  }
  peers_->wake_urgently(peers_->rank());
}

// What the watching thread has learnt of other hosts.
void Engine::look_at_news() {
  std::optional<Failure> heard;
  std::vector<int> lost, unheard;
  {
    std::lock_guard lock(mutex_);
    heard.swap(remote_failure_), lost.swap(lost_hosts_), unheard.swap(unheard_hosts_);
  }
  for (int host : unheard)
    for (int rank : peers_->topology().hosts[size_t(host)]) peers_->probe(rank);
  for (int host : lost) {
    std::string names;
    for (int rank : peers_->topology().hosts[size_t(host)])
      if (!left_[size_t(rank)]) names += (names.empty() ? "" : ", ") + peers_->name(rank);
    if (names.empty()) continue;  // they had all left
    return end_epoch(Code::peer_lost, "a host is lost, nothing was heard of it for " +
                                          std::to_string(kDeadNs / 1'000'000'000) + " s: " + names);
  }
  if (!heard) return;
  cause_sent_ = true;
  if (heard->first != Code::shut_down) return end_epoch(heard->first, heard->second);
  if (!ending_) ending_ = heard, ending_ns_ = moved_ns_ = now_ns();
}

// Under the progress lock: someone left, failed or died. The first cause is what everyone should hear: a death, then
// what a failed rank says it failed of.
void Engine::look_at_peers() {
  peers_->own().alarm.exchange(0);  // and sees what was written before it
  peers_->own().awake_ns.store(now_ns(), std::memory_order_relaxed);
  if (over_) return;
  look_at_news();
  if (over_) return;
  for (auto& [id, group_engine] : group_engines_) group_engine->control_plane().expedite();
  for (int rank : peers_->ranks_on_this_host())
    if (rank != peers_->rank() && ended_[rank] && peers_->header(rank).presence == Presence::here)
      return end_epoch(Code::peer_lost, peers_->name(rank) + " died");
  std::vector<int> leavers;
  for (int rank : peers_->ranks_on_this_host()) {
    Header& header = peers_->header(rank);
    if (rank == peers_->rank()) continue;
    if (header.presence == Presence::failed) {
      Failure failure(Code(header.cause_code), cause_of(header));
      cause_sent_ = true;  // that rank has
      if (failure.first != Code::shut_down) return end_epoch(failure.first, failure.second);
      if (!ending_) ending_ = failure, ending_ns_ = moved_ns_ = now_ns();
    }
    if (header.presence == Presence::left && !std::exchange(left_[rank], 1)) leavers.push_back(rank);
  }
  auto earlier = [&](int a, int b) { return peers_->header(a).left_ns < peers_->header(b).left_ns; };
  std::sort(leavers.begin(), leavers.end(), earlier);
  for (int rank : leavers) {
    const std::string why = cause_of(peers_->header(rank));
    if (first_left_.empty()) first_left_ = why;
    for (auto& [id, group_engine] : group_engines_) group_engine->rank_left(rank, why);
  }
}

void Engine::remote_rank_left(int rank, const std::string& why) {
  if (first_left_.empty()) first_left_ = why;
  left_[size_t(rank)] = 1;
  peers_->mark_left(rank);
}

// A rank that left or was interrupted had sent its part of all that it finished, and the other ranks are there: what
// it took part in can still be finished here.
void Engine::end_when_quiet(bool moved) {
  uint64_t now = now_ns();
  if (moved) moved_ns_ = now;
  if (outstanding_ == 0 || now - moved_ns_ > kQuietNs || now - ending_ns_ > kLongestEndNs)
    end_epoch(ending_->first, ending_->second);
}

void Engine::end_epoch(Code code, const std::string& why) {
  if (over_.exchange(true)) return;
  // What the system refused, it refused to one rank; all hear to which.
  const bool own_refusal = code == Code::internal && !why.starts_with("rank ");
  const std::string text = own_refusal ? peers_->name(peers_->rank()) + ": " + why : why;
  {
    std::lock_guard lock(mutex_);
    failure_ = Failure{code, text};
  }
  Header& own = peers_->own();
  set_cause(own, code, text);
  own.presence = Presence::failed;
  // First out of reach of ranks that may still be writing, then tell.
  peers_->arena()->abandon();
  outputs_->close();
  peers_->end_links(Error(code, text));
  if (HeartbeatSocket* heartbeats = peers_->heartbeats()) heartbeats->announce_end(code, text, now_ns(), cause_sent_);
  for (auto& [id, group_engine] : group_engines_) group_engine->fail_all(code, text);
  if (RequestPtr join = join_) finish(join, code, join->title() + ": " + text);  // no group engine may have it any more
  ring_local_ranks();
}

void Engine::ring_local_ranks() {
  for (int rank : peers_->ranks_on_this_host())
    if (rank != peers_->rank()) peers_->wake_urgently(rank);
}

void Engine::abort(const std::string& cause) {
  while (progress_lock_.exchange(true)) {
    if (stopping_) return;  // shutdown keeps the progress lock
    sched_yield();
  }
  end_epoch(Code::shut_down, cause);
  progress_lock_.store(false);
}

// What this rank has agreed to with others must reach them.
void Engine::flush() {
  for (uint64_t deadline = now_ns() + kFlushNs; now_ns() < deadline && !over_;) {
    bool waiting = false;
    for (auto& [id, group_engine] : group_engines_) waiting |= group_engine->flush();
    peers_->flush_and_wake();
    if (!waiting) break;
    sched_yield();
  }
}

// What the others hear of this rank's leaving. Where it has failed here because another had left, that comes with it:
// whoever hears of both should learn of the first.
std::string Engine::leave_message(const std::string& reason) const {
  const std::string& name = peers_->name(world_.rank);
  if (!hit_) return name + kHasLeft + " (" + std::string(cut(reason, kReasonBytes)) + ")";
  const size_t after = first_left_.find(kAfter);
  return name + kAfter + (after == first_left_.npos ? first_left_ : first_left_.substr(after + kAfter.size()));
}

// To other hosts; the ranks of this one see it.
void Engine::send_leave_message(const std::string& text) {
  if (peers_->all_local()) return;
  for (auto& [id, group_engine] : group_engines_) group_engine->control_plane().leave(text);
  flush();
}

// After an end in peace all that was sent has to arrive. After another one everybody has been told by a datagram; where
// none gets through, they hear the cause when they connect again.
void Engine::leave_network(bool failed) {
  const bool alone = peers_->heartbeats() && !peers_->heartbeats()->all_heard();
  const uint64_t deadline = now_ns() + kFlushNs;
  try {
    while (now_ns() < deadline && (failed ? alone : !peers_->finish_links())) {
      peers_->wait_for_network(kLookNs);
      peers_->step();
    }
  } catch (const Error&) {  // whoever is lost only now is nothing to a rank that leaves
  }
  peers_->close_links();
}

std::string Engine::failure() const {
  std::lock_guard lock(mutex_);
  return failure_ ? failure_->second : "";
}

void Engine::shutdown(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_.exchange(true)) return;
  }
  wake_engine_thread();
  peers_->wake_own_driver();
  thread_.join();
  while (progress_lock_.exchange(true)) sched_yield();  // and never given back
  end_epoch_on_error([&] {
    take_inbox();
    flush();
  });
  bool unfinished = outstanding_ > 0;
  const std::string text = leave_message(reason);
  if (!unfinished && !over_) end_epoch_on_error([&] { send_leave_message(text); });
  if (unfinished) peers_->arena()->abandon(), outputs_->close();
  for (auto& [id, group_engine] : group_engines_)
    group_engine->fail_all(Code::shut_down, "lightcc has been shut down on this rank");
  end_epoch_on_error([&] { peers_->flush_and_wake(); });
  // Others wait for what this rank will not send any more, or for each other because of it: this ends the epoch. A rank
  // that leaves with nothing in flight has sent all that anyone needs of it.
  if (unfinished)
    end_epoch(Code::shut_down, text + ", with work in flight");
  peers_->own().left_ns = now_ns();
  const bool failed = over_.exchange(true);
  if (!failed) {
    set_cause(peers_->own(), Code::ok, text);
    peers_->own().presence = Presence::left;
  }
  ring_local_ranks();
  outputs_->close();
  leave_network(failed);
  const auto left = [&](int rank) { return peers_->header(rank).presence != Presence::here; };
  auto& here = peers_->ranks_on_this_host();
  if (HeartbeatSocket* heartbeats = peers_->heartbeats(); heartbeats && std::all_of(here.begin(), here.end(), left))
    heartbeats->announce_end(Code::ok, "", now_ns());
  watch_.reset();
  timeline_->stop(now_ns());
}

}  // namespace lightcc
