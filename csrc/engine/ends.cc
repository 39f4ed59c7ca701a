// How an engine's epoch ends: by shutdown here, by a peer that left, failed or died, or by an interrupt.
#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "engine/engine.h"

namespace lightcc {
namespace {

// After a peer ended the epoch in peace: the end comes once nothing has moved for so long, or after so long in all.
constexpr uint64_t kQuietNs = 50'000'000, kLongestEndNs = 1'000'000'000;
constexpr uint64_t kFlushNs = 1'000'000'000;  // the longest that shutdown tries to send what it owes
constexpr uint64_t kLookNs = 1'000'000, kPauseNs = 100'000'000;

constexpr const char* kHasLeft = " has left (it shut down)";

}  // namespace

bool Engine::pause() {
  for (uint64_t deadline = now_ns() + kPauseNs; baton_.exchange(true); sched_yield())
    if (stopping_ || now_ns() > deadline) return false;
  return true;
}

void Engine::close_in_child(bool paused) {
  if (watch_) watch_->close_in_child();
  if (Heart* heart = peers_->heart()) heart->close_in_child();
  if (Network* network = peers_->network(); network && paused) network->close_in_child();
}

std::unique_ptr<Watch> Engine::watch() {
  auto on_end = [this](int local) { peer_ended(peers_->ranks_here()[size_t(local)]); };
  Heart* heart = peers_->heart();
  if (!heart) return std::make_unique<Watch>(peers_->host().take_pidfds(), on_end);
  heart->listen({[this](int host) { host_lost(host); },
                 [this](int host) { host_unheard(host); },
                 [this](Code code, const std::string& cause) { hear(code, cause); }});
  return std::make_unique<Watch>(peers_->host().take_pidfds(), on_end, [heart] { heart->tick(now_ns()); }, kBeatNs);
}

void Engine::peer_ended(int rank) {
  ended_[rank] = true;
  peers_->ring_urgently(peers_->rank());
}

void Engine::hear(Code code, const std::string& text) {
  {
    std::lock_guard lock(mutex_);
    if (!heard_) heard_ = Failure(code, text);
  }
  peers_->ring_urgently(peers_->rank());
}

void Engine::host_lost(int host) {
  {
    std::lock_guard lock(mutex_);
    lost_hosts_.push_back(host);
  }
  peers_->ring_urgently(peers_->rank());
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
  peers_->ring_urgently(peers_->rank());
}

// What the watching thread has heard of other hosts.
void Engine::look_at_news() {
  std::optional<Failure> heard;
  std::vector<int> lost, unheard;
  {
    std::lock_guard lock(mutex_);
    heard.swap(heard_), lost.swap(lost_hosts_), unheard.swap(unheard_hosts_);
  }
  for (int host : unheard)
    for (int rank : peers_->topology().hosts[size_t(host)]) peers_->network()->doubt(rank);
  for (int host : lost) {
    std::string names;
    for (int rank : peers_->topology().hosts[size_t(host)])
      if (!left_[size_t(rank)]) names += (names.empty() ? "" : ", ") + peers_->name(rank);
    if (names.empty()) continue;  // they had all left
    return end_epoch(Code::peer_lost, "a host is lost, nothing was heard of it for " +
                                          std::to_string(kDeadNs / 1'000'000'000) + " s: " + names);
  }
  if (!heard) return;
  told_ = true;
  if (heard->first != Code::shut_down) return end_epoch(heard->first, heard->second);
  if (!ending_) ending_ = heard, ending_ns_ = moved_ns_ = now_ns();
}

// Under the baton: someone left, failed or died. The first cause is what everyone should hear: a death, then
// what a failed rank says it failed of.
void Engine::look_at_peers() {
  peers_->own().alarm.exchange(0);  // and sees what was written before it
  peers_->own().awake_ns.store(now_ns(), std::memory_order_relaxed);
  if (over_) return;
  look_at_news();
  if (over_) return;
  for (auto& [id, channel] : channels_) channel->courier().hurry();
  for (int rank : peers_->ranks_here())
    if (rank != peers_->rank() && ended_[rank] && peers_->header(rank).presence == Presence::here)
      return end_epoch(Code::peer_lost, peers_->name(rank) + " died");
  std::vector<int> leavers;
  for (int rank : peers_->ranks_here()) {
    Header& header = peers_->header(rank);
    if (rank == peers_->rank()) continue;
    if (header.presence == Presence::failed) {
      Failure failure(Code(header.cause_code), std::string(header.cause, strnlen(header.cause, sizeof header.cause)));
      told_ = true;  // that rank has
      if (failure.first != Code::shut_down) return end_epoch(failure.first, failure.second);
      if (!ending_) ending_ = failure, ending_ns_ = moved_ns_ = now_ns();
    }
    if (header.presence == Presence::left && !std::exchange(left_[rank], 1)) leavers.push_back(rank);
  }
  auto earlier = [&](int a, int b) { return peers_->header(a).left_ns < peers_->header(b).left_ns; };
  std::sort(leavers.begin(), leavers.end(), earlier);
  for (int rank : leavers)
    for (auto& [id, channel] : channels_) channel->gone(rank, peers_->name(rank) + kHasLeft);
}

void Engine::has_left(int rank) {
  left_[size_t(rank)] = 1;
  peers_->network()->excuse(rank);
}

// A rank that left or was interrupted had sent its part of all that it finished, and the other ranks are there: what
// it took part in can still be finished here.
void Engine::end_when_quiet(bool moved) {
  uint64_t now = now_ns();
  if (moved) moved_ns_ = now;
  if (outstanding_ == 0 || now - moved_ns_ > kQuietNs || now - ending_ns_ > kLongestEndNs)
    end_epoch(ending_->first, ending_->second);
}

void Engine::end_epoch(Code code, const std::string& text) {
  if (over_.exchange(true)) return;
  {
    std::lock_guard lock(mutex_);
    failure_ = Failure{code, text};
  }
  Header& own = peers_->own();
  own.cause_code = int32_t(code);
  text.copy(own.cause, sizeof own.cause - 1);
  own.presence = Presence::failed;
  // First out of reach of ranks that may still be writing, then tell.
  peers_->arena()->abandon();
  if (Network* network = peers_->network()) network->end(Error(code, text));
  if (Heart* heart = peers_->heart()) heart->tell(code, text, now_ns(), told_);
  for (auto& [id, channel] : channels_) channel->fail_all(code, text);
  if (RequestPtr join = join_) finish(join, code, join->title() + ": " + text);  // no channel may have it any more
  ring_mates();
}

void Engine::ring_mates() {
  for (int rank : peers_->ranks_here())
    if (rank != peers_->rank()) peers_->ring_urgently(rank);
}

void Engine::abort(const std::string& cause) {
  while (baton_.exchange(true)) {
    if (stopping_) return;  // shutdown keeps the baton
    sched_yield();
  }
  end_epoch(Code::shut_down, cause);
  baton_.store(false);
}

// What this rank has agreed to with others must reach them.
void Engine::flush() {
  for (uint64_t deadline = now_ns() + kFlushNs; now_ns() < deadline && !over_;) {
    bool waiting = false;
    for (auto& [id, channel] : channels_) waiting |= channel->flush();
    peers_->ring_marked();
    if (!waiting) break;
    sched_yield();
  }
}

// To other hosts; the ranks of this one see it.
void Engine::say_goodbye() {
  if (!peers_->network()) return;
  for (auto& [id, channel] : channels_) channel->courier().leave(peers_->name(world_.rank) + kHasLeft);
  flush();
}

// After an end in peace all that was sent has to arrive. After another one everybody has been told by a datagram; where
// none gets through, they hear the cause when they connect again.
void Engine::leave_network(bool failed) {
  Network* network = peers_->network();
  if (!network) return;
  const bool alone = !peers_->heart()->all_heard();
  const uint64_t deadline = now_ns() + kFlushNs;
  try {
    while (now_ns() < deadline && (failed ? alone : !network->finish())) {
      network->wait(kLookNs, -1);
      network->step();
    }
  } catch (const Error&) {  // whoever is lost only now is nothing to a rank that leaves
  }
  network->close();
}

void Engine::shutdown() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_.exchange(true)) return;
  }
  wake_engine_thread();
  peers_->ring_own_driver();
  thread_.join();
  while (baton_.exchange(true)) sched_yield();  // and never given back
  take_inbox();
  flush();
  bool unfinished = outstanding_ > 0;
  if (!unfinished && !over_) say_goodbye();
  if (unfinished) peers_->arena()->abandon();
  for (auto& [id, channel] : channels_) channel->fail_all(Code::shut_down, "lightcc has been shut down on this rank");
  peers_->ring_marked();
  // Others wait for what this rank will not send any more, or for each other because of it: this ends the epoch. A rank
  // that leaves with nothing in flight has sent all that anyone needs of it.
  if (unfinished)
    end_epoch(Code::shut_down, peers_->name(world_.rank) + " has left (it shut down) with work in flight");
  peers_->own().left_ns = now_ns();
  const bool failed = over_.exchange(true);
  if (!failed) peers_->own().presence = Presence::left;
  ring_mates();
  leave_network(failed);
  const auto left = [&](int rank) { return peers_->header(rank).presence != Presence::here; };
  auto& here = peers_->ranks_here();
  if (Heart* heart = peers_->heart(); heart && std::all_of(here.begin(), here.end(), left))
    heart->tell(Code::ok, "", now_ns());
  watch_.reset();
  timeline_->stop(now_ns());
}

}  // namespace lightcc
