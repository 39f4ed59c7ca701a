// How an engine's epoch ends: by shutdown here, by a peer that left, failed or died, or by an interrupt.
#include <algorithm>
#include <cstring>

#include "engine/engine.h"

namespace lightcc {
namespace {

// After a peer ended the epoch in peace: the end comes once nothing has moved for so long, or after so long in all.
constexpr uint64_t kQuietNs = 50'000'000, kLongestEndNs = 1'000'000'000;
constexpr uint64_t kFlushNs = 1'000'000'000;  // the longest that shutdown tries to send what it owes

}  // namespace

void Engine::peer_ended(int rank) {
  ended_[rank] = true;
  host_->ring_urgently(host_->rank());
}

// Under the baton: someone left, failed or died. The first cause is what everyone should hear: a death, then
// what a failed rank says it failed of.
void Engine::look_at_peers() {
  host_->header(host_->rank()).alarm.exchange(0);  // and sees what was written before it
  if (over_) return;
  for (int rank = 0; rank < host_->size(); ++rank)
    if (rank != host_->rank() && ended_[rank] && host_->header(rank).presence == Presence::here)
      return end_epoch(Code::peer_lost, host_->name(rank) + " died");
  std::vector<int> leavers;
  for (int rank = 0; rank < host_->size(); ++rank) {
    Header& header = host_->header(rank);
    if (rank == host_->rank()) continue;
    if (header.presence == Presence::failed) {
      Failure failure(Code(header.cause_code), std::string(header.cause, strnlen(header.cause, sizeof header.cause)));
      if (failure.first != Code::shut_down) return end_epoch(failure.first, failure.second);
      if (!ending_) ending_ = failure, ending_ns_ = moved_ns_ = now_ns();
    }
    if (header.presence == Presence::left && !std::exchange(left_[rank], 1)) leavers.push_back(rank);
  }
  auto earlier = [&](int a, int b) { return host_->header(a).left_ns < host_->header(b).left_ns; };
  std::sort(leavers.begin(), leavers.end(), earlier);
  for (int rank : leavers)
    for (auto& [id, channel] : channels_) channel->gone(rank, host_->name(rank) + " has left (it shut down)");
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
  Header& own = host_->header(host_->rank());
  own.cause_code = int32_t(code);
  text.copy(own.cause, sizeof own.cause - 1);
  own.presence = Presence::failed;
  // First out of reach of ranks that may still be writing, then tell.
  host_->arena()->abandon();
  for (auto& [id, channel] : channels_) channel->fail_all(code, text);
  if (RequestPtr join = join_) finish(join, code, join->title() + ": " + text);  // no channel may have it any more
  for (int rank = 0; rank < host_->size(); ++rank) {
    if (rank == host_->rank()) continue;
    host_->ring_urgently(rank);
  }
}

void Engine::abort(const std::string& cause) {
  while (baton_.exchange(true)) {
    if (stopping_) return;  // shutdown keeps the baton
    sched_yield();
  }
  end_epoch(Code::shut_down, cause);
  baton_.store(false);
}

void Engine::shutdown() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_.exchange(true)) return;
  }
  wake_engine_thread();
  own_driver().ring();
  thread_.join();
  watch_.reset();
  while (baton_.exchange(true)) sched_yield();  // and never given back
  take_inbox();
  for (uint64_t deadline = now_ns() + kFlushNs; now_ns() < deadline && !over_;) {
    // What this rank has agreed to with others must reach them.
    bool waiting = false;
    for (auto& [id, channel] : channels_) waiting |= channel->flush();
    host_->ring_marked();
    if (!waiting) break;
    sched_yield();
  }
  bool unfinished = outstanding_ > 0;
  if (unfinished) host_->arena()->abandon();
  for (auto& [id, channel] : channels_) channel->fail_all(Code::shut_down, "lightcc has been shut down on this rank");
  host_->ring_marked();
  // Others wait for what this rank will not send any more, or for each other because of it: this ends the epoch. A rank
  // that leaves with nothing in flight has sent all that anyone needs of it.
  if (unfinished) end_epoch(Code::shut_down, host_->name(world_.rank) + " has left (it shut down) with work in flight");
  host_->header(host_->rank()).left_ns = now_ns();
  if (!over_.exchange(true)) host_->header(host_->rank()).presence = Presence::left;
  for (int rank = 0; rank < host_->size(); ++rank) {
    if (rank == host_->rank()) continue;
    host_->ring_urgently(rank);
  }
  timeline_->stop(now_ns());
}

}  // namespace lightcc
