#include "engine/engine_impl.h"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/overloaded.h"
#include "engine/negotiate/control/fusion.h"
#include "engine/request/validate.h"

namespace lightcc {
namespace {

constexpr uint64_t kNoTimeout = UINT64_MAX, kTickNs = 100'000'000;
constexpr uint64_t kWatchNs = 10'000'000, kPollNs = 50'000;
constexpr uint64_t kBlockedNs = 500'000'000;  // waits longer than this may be a deadlock
constexpr uint64_t kNapNs = 50'000;
constexpr int kNaps = 20;  // after its last work the engine thread looks again for a millisecond, so that a burst of
                           // submissions wakes it once

void nap() {
  timespec time{0, kNapNs};
  nanosleep(&time, nullptr);
}

// Why a second request of a name is refused.
std::string still_in_flight(int rank, bool in_another_thread) {
  return "one of this name is still in flight on rank " + std::to_string(rank) +
         (in_another_thread ? ", in another thread, so ranks may pair different calls: give each thread names of its "
                              "own. All ranks refuse this name until the next barrier() of its process set "
                              "(docs/errors.md)"
                            : "; synchronize it first, or use another name");
}

// To start a collective on a GPU takes the host long, and the caller has more work to give that GPU meanwhile.
bool is_left_to_engine_thread(const Request& request) { return request.place.kind == DeviceKind::cuda; }

// A waiting thread may spin only if every rank has a core to itself; else whoever spins keeps from working whom it
// waits for.
uint64_t most_spin_ns(const Config& config, const LocalRanks& local_ranks) {
  if (config.spin_us >= 0) return uint64_t(config.spin_us) * 1000;
  return local_ranks.size() > local_ranks.cores() ? 0 : 20'000;
}

}  // namespace

Engine::Impl::Impl(std::unique_ptr<Peers> peers, World world, Config config, std::unique_ptr<Timeline> timeline)
    : peers_(std::move(peers)),
      world_(std::move(world)),
      config_(std::move(config)),
      outputs_(std::make_shared<OutputPool>(size_t(config_.output_pool_bytes), uint64_t(config_.output_idle_s * 1e9))),
      pinned_(std::make_shared<PinnedPool>(peers_->arena(), size_t(config_.pinned_bytes))),
      timeline_(timeline ? std::move(timeline) : std::make_unique<Timeline>()),
      wait_habit_(most_spin_ns(config_, peers_->local_ranks())),
      blocked_state_(peers_->rank()),
      deadlock_detector_([this](int rank, int group) {
        const auto found = this->group(group);
        return found && found->contains(rank);
      }),
      inbox_(peers_->rank()),
      health_events_(peers_->size()) {
  epoch_.rank_name = peers_->name(peers_->rank());
  std::vector<int> all(peers_->size());
  for (int i = 0; i < peers_->size(); ++i) all[i] = i;
  group_engines_[0] = make_group_engine(groups_.add(all, peers_->rank(), peers_->topology()));
  selector_text_ = group_engines_[0]->selector().text();
  if (peers_->size() > 1) watch_ = watch();
  thread_ = std::thread([this] { run(); });
}

void Engine::Impl::with_peers(const std::function<void(Peers&)>& body) {
  while (!progress_lock_.try_lock()) sched_yield();
  end_epoch_on_error([&] { body(*peers_); });
  progress_lock_.unlock();
}

void Engine::Impl::use(Calibrated calibrated) {
  with_peers([&](Peers&) {
    calibrated_ = std::move(calibrated);
    group_engines_[0]->use_rules(calibrated_.rules, calibrated_.costs);
    selector_text_ = "network: " + calibrated_.network + "\n" + group_engines_[0]->selector().text();
  });
}

void Engine::Impl::reset_counters() {
  with_peers([&](Peers&) {
    for (auto& value : counters_.values) value = 0;
    sent_bytes_before_ = peers_->sent_bytes("harp") + peers_->sent_bytes("plugin");  // it has one of them at most
  });
}

// ---- requests

// Other ranks may take the same request and wait for this one: their warnings will say why.
void Engine::Impl::report_refusal(const Request& request, const std::string& why, bool contended) {
  if (request.key.empty()) return;  // of no name that others could wait for
  if (inbox_.add_refusal(request, why, contended)) drive();
}

// Returns how many are in flight with it.
int Engine::Impl::take_in(const RequestPtr& request, uint64_t now_ns, bool will_wait, StreamMark* last) {
  try {
    validate(*request, group(request->group).get(), world_.rank);
    note_stream(*request, last);
  } catch (const Error& error) {
    report_refusal(*request, error.what());
    throw;
  }
  request->submitted_ns = request->warned_ns = now_ns;
  const bool has_handle = !request->automatic && !will_wait && !request->callbacks.done;
  const int in_flight = is_on_fast_path(*request) ? Inbox::kContended : inbox_.add(request, has_handle);
  if (in_flight > 0) return in_flight;
  const bool contended = in_flight == Inbox::kContended;
  const std::string why = still_in_flight(world_.rank, contended);
  report_refusal(*request, why, contended);
  throw Error(Code::invalid_argument, request->title() + ": " + why);
}

void Engine::Impl::submit(const RequestPtr& request, bool will_wait) {
  counters_.raise(Counters::most_in_flight, uint64_t(take_in(request, now_ns(), will_wait)));
  if (!will_wait && is_left_to_engine_thread(*request)) return wake_engine_thread();
  note_visit();
  // In a burst of small requests each step takes along what has gathered since the last; whoever waits drives at once.
  const uint64_t since_step_ns = request->submitted_ns - driven_ns_.load(std::memory_order_relaxed);
  if (will_wait || !gathers_for_next_step(since_step_ns, bytes_of(request->what))) {
    driven_ns_.store(request->submitted_ns, std::memory_order_relaxed);
    drive();
  }
  if (!will_wait && !request->finished.load(std::memory_order_acquire)) wake_engine_thread();
}

void Engine::Impl::submit_all(std::span<const RequestPtr> requests, size_t* begun) {
  if (requests.empty()) return;
  const uint64_t now = now_ns();
  const auto go = [&] {
    counters_.raise(Counters::most_in_flight, uint64_t(inbox_.in_flight()));
    if (is_left_to_engine_thread(*requests.front())) return wake_engine_thread();
    note_visit();
    driven_ns_.store(now, std::memory_order_relaxed);
    drive();
    if (inbox_.in_flight() > 0) wake_engine_thread();
  };
  try {
    StreamMark last;
    for (*begun = 0; *begun < requests.size(); ++*begun) take_in(requests[*begun], now, false, &last);
  } catch (...) {
    go();
    throw;
  }
  go();
}

// One may bring about others, which come behind it.
void Engine::Impl::carry_out_effects() {
  progress_lock_.assert_held();
  while (auto effect = effects_.pop())
    std::visit(Overloaded{[&](const effect::Finish& end) { finish(end.request, end.code, end.text); },
                          [&](const effect::SkipName& name) { inbox_.skip_name(name.group, name.key); },
                          [&](const effect::ChangeGroups& change) { change_groups(*change.request); },
                          [&](const effect::EndEpoch& end) { end_epoch(end.cause.code, end.cause.text); },
                          [&](const effect::RankLeft& left) { apply(epoch_event::PeerLeft{left.rank, left.why}); },
                          [&](const effect::AwaitTurn& turn) { await_turn(*turn.group); },
                          [&](const effect::WaitsFor& wait) {
                            blocked_state_.waits_for(wait.group, wait.key, wait.ranks);
                          },
                          [&](const BlockedReport& report) { deadlock_detector_.receive(report); },
                          [&](const DeadlockReply& reply) { deadlock_detector_.receive(reply); },
                          [&](const DeadlockProbe& probe) { blocked_state_.add(probe); }},
               *effect);
}

void Engine::Impl::finish(const RequestPtr& request, Code code, const std::string& text) {
  progress_lock_.assert_held();
  if (request->what.kind == Kind::join && join_goes_on(request, code, text)) return;
  request->name_held = inbox_.release_name(*request);
  if (code == Code::shut_down) apply(epoch_event::RequestShutDown{});
  finish_deadlock(*request, code, text);
  blocked_state_.unblock();
  tracing_.finished(*request, code, text);
  request->code = code;
  request->text = text;
  counters_.count(Counters::requests);
  Callbacks callbacks = request->callbacks;  // once finished, the request may be gone
  if (callbacks.received && request->what.kind == Kind::alltoall && code == Code::ok)
    for (size_t i = 0; i < request->results.size(); ++i) {
      const auto& rows = request->results[i].rows_from;
      callbacks.received(callbacks.context, int(i), rows.data(), int(rows.size()));
    }
  request->finished.store(true, std::memory_order_seq_cst);
  inbox_.finished();
  if (callbacks.done) callbacks.done(callbacks.context, int(code), text.c_str());
  peers_->wake_own_driver();  // other threads of this rank may wait for it
}

bool Engine::Impl::wait(Request& request, uint64_t deadline_ns) {
  if (request.finished.load(std::memory_order_acquire)) return true;
  uint64_t begin = now_ns();
  note_visit();
  waiters_.fetch_add(1);
  request.awaited.store(true);
  if (request.planned.load()) awaits_planned_.store(true);
  SpinPolicy patience(wait_habit_);
  while (!request.finished.load(std::memory_order_acquire)) {
    if (drive()) {
      patience.reset();
    } else if (!patience.wait_a_little()) {
      uint64_t now = now_ns();
      if (now >= deadline_ns) break;
      if (now - request.submitted_ns > kBlockedNs && waiters_ == 1) report_if_blocked(request, now);
      sleep(Sleeper::caller, std::min(deadline_ns - now, kTickNs), request.finished);
      patience.reset();
    }
  }
  counters_.add(Counters::wait_ns, now_ns() - begin);
  const int others = waiters_.fetch_sub(1) - 1;
  if (others > 0) peers_->wake_own_driver();  // one of them watches the network from now on
  else if (inbox_.in_flight() > 0 || peers_->network_busy() || nobody_watches_network()) wake_engine_thread();
  return request.finished.load(std::memory_order_acquire);
}

void Engine::Impl::give_back(Request& request) {
  if (request.finished.load(std::memory_order_acquire) && !request.name_held.exchange(false)) return;
  inbox_.give_back(request);
}

bool Engine::Impl::poll(Request& request) {
  bool finished = request.finished.load(std::memory_order_acquire);
  if (!finished) drive();
  return finished;
}

// ---- the progress lock

bool Engine::Impl::drive(Sleeper who) {
  bool moved = false;
  do {
    if (!progress_lock_.try_lock()) return moved;
    moved |= step(who);
    progress_lock_.unlock();
  } while (inbox_.full());  // submitted while we held the progress lock
  return moved;
}

bool Engine::Impl::step(Sleeper who) {
  progress_lock_.assert_held();
  bool moved = false;
  end_epoch_on_error([&] {
    if (peers_->own().alarm.load(std::memory_order_relaxed)) look_at_peers();
    moved = peers_->step();
    moved |= take_inbox();
    if (epoch_.over()) return;
    if (suspicion_)
      await_verdict(moved);
    else
      step_groups(moved);
  });
  if (moved) counters_.add(who == Sleeper::engine_thread ? Counters::background_steps : Counters::caller_steps);
  return moved;
}

void Engine::Impl::step_groups(bool& moved) {
  progress_lock_.assert_held();
  bool holds = false, watches = false, polls = false;
  if (awaits_planned_.load(std::memory_order_relaxed) && awaits_planned_.exchange(false))
    for (auto& [id, group_engine] : group_engines_) group_engine->leave_awaited_plans();
  for (auto it = group_engines_.begin(); it != group_engines_.end(); ++it) {
    moved |= it->second->step();
    carry_out_effects();
    holds |= it->second->control_plane().holds();
    watches |= it->second->watches_gpu();
    polls |= it->second->polls();
  }
  holds_.store(holds, std::memory_order_relaxed);
  polls_.store(polls, std::memory_order_relaxed);
  if (watches != watches_.load(std::memory_order_relaxed)) {
    watches_.store(watches);
    if (watches) peers_->wake_own_engine();  // it may sleep without end
  }
  if (blocked_state_.pending() || deadlock_detector_.pending()) moved |= detect_deadlocks();
  const bool works = inbox_.in_flight() > 0 || watches;
  if (epoch_.phase == EpochState::Phase::draining) apply(epoch_event::Stepped{moved, works});
  if (uint64_t now; !moved && inbox_.in_flight() > 0 && (now = now_ns()) - inspected_ns_ > kTickNs) {
    inspected_ns_ = now;
    peers_->own().awake_ns.store(now, std::memory_order_relaxed);
    for (auto& [id, group_engine] : group_engines_) {
      group_engine->remind();
      group_engine->leave_stuck_plans(now);
      if (config_.stall_check) group_engine->inspect(now);
    }
    carry_out_effects();
  }
  peers_->flush_and_wake();
}

bool Engine::Impl::take_inbox() {
  progress_lock_.assert_held();
  if (!inbox_.full()) return false;
  const auto [requests, refusals] = inbox_.take();
  blocked_state_.unblock();  // this rank goes on
  const bool failed = epoch_.phase == EpochState::Phase::failed;
  auto refusal = refusals.begin();
  for (size_t i = 0; i <= requests.size(); ++i) {
    for (; refusal != refusals.end() && refusal->position <= i; ++refusal)
      if (auto group_engine = group_engines_.find(refusal->group); group_engine != group_engines_.end() && !failed)
        refusal->contended ? group_engine->second->contended(refusal->key)
                           : group_engine->second->refused(refusal->key, refusal->why);
    if (i == requests.size()) break;
    const RequestPtr& request = requests[i];
    auto group_engine = group_engines_.find(request->group);
    if (failed)
      finish(request, epoch_.cause.code, request->title() + ": " + epoch_.cause.text);
    else if (group_engine == group_engines_.end())
      finish(request, Code::invalid_argument, request->title() + ": its process set was removed");
    else if (request->what.kind == Kind::join)
      join(request);
    else
      submit_to(*group_engine->second, request);
  }
  carry_out_effects();
  return true;
}

// It may have been taken in beside a call of the same name that was on its way to the fast path.
void Engine::Impl::submit_to(GroupEngine& group_engine, const RequestPtr& request) {
  progress_lock_.assert_held();
  if (group_engine.submit(request)) return;
  finish(request, Code::mismatch, request->title() + ": " + still_in_flight(world_.rank, true));
  group_engine.contended(request->key);
}

void Engine::Impl::sleep(Sleeper who, uint64_t timeout_ns, const std::atomic<bool>& finished) {
  peers_->sleep(who, own_driver(), polls_ ? kPollNs : timeout_ns, [&] {
    if (finished || (who == Sleeper::engine_thread && waiters_ > 0)) return true;
    // Only a step that ran after we said that we sleep proves that there is nothing to do.
    if (!progress_lock_.try_lock()) return true;
    bool moved = step(who);
    progress_lock_.unlock();
    return moved || inbox_.full();
  });
}

// ---- the engine thread

void Engine::Impl::run() {
  prctl(PR_SET_NAME, "lightcc-engine");
  while (!stopping_) {
    if (!needed()) {
      nap_or_park();
    } else if (progress_lock_.is_held()) {
      nap();  // a caller makes steps, and needs its core
    } else if (!drive(Sleeper::engine_thread)) {
      sleep(Sleeper::engine_thread, kTickNs, stopping_);
    }
  }
}

// There is work, no caller waits, and none has come by since the last look: a framework that calls often makes the
// steps itself, and its core is better left to it.
bool Engine::Impl::needed() {
  uint32_t visits = visits_.load(std::memory_order_relaxed);
  return std::exchange(visits_seen_, visits) == visits && inbox_.in_flight() > 0 && waiters_ == 0;
}

// While callers wait they make the steps and one of them watches the network, so this thread does neither; the last
// of them to go rings it.
void Engine::Impl::nap_or_park() {
  auto alarmed = [&] { return peers_->own().alarm != 0; };  // rung while this thread was not asleep
  auto wanted = [&] { return stopping_ || alarmed() || (inbox_.in_flight() > 0 && waiters_ == 0); };
  const bool watches = watches_;
  for (int naps = 0; naps < kNaps; ++naps) {
    const uint32_t seen = visits_seen_;
    if (stopping_ || needed()) return;
    // Each caller that leaves would wake this thread to watch the network; while they come often it stays up instead.
    if (!peers_->all_local() && visits_seen_ != seen) naps = 0;
    if (alarmed()) break;
    if (waiters_ == 0 && peers_->network_busy()) drive(Sleeper::engine_thread);
    nap();
  }
  if (waiters_ > 0)
    own_engine().sleep(kTickNs, [&] { return wanted() || waiters_ == 0; });
  else
    peers_->sleep(Sleeper::engine_thread, own_engine(), watches ? kWatchNs : holds_ ? kTickNs : kNoTimeout,
                  [&] { return wanted() || waiters_ > 0 || watches_ != watches; });
  drive(Sleeper::engine_thread);  // a peer may have rung: it asks something, or leaves
}

bool Engine::Impl::nobody_watches_network() {
  return !peers_->all_local() && own_engine().sleepers.load(std::memory_order_seq_cst) > 0;
}

void Engine::Impl::wake_engine_thread() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  peers_->wake_own_engine();
  if (inbox_.full()) peers_->wake_own_driver();  // with work in flight it sleeps there, as callers do
}

}  // namespace lightcc
