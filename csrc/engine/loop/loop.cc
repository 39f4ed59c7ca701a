#include "engine/loop/loop.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "engine/negotiate/control/hold.h"

namespace lightcc {
namespace {

constexpr uint64_t kNoTimeout = UINT64_MAX, kTickNs = 100'000'000;
constexpr uint64_t kWatchNs = 10'000'000, kPollNs = 50'000;
// After its last work the engine thread looks again for a millisecond, so that a burst of submissions wakes it once. It
// looks less and less often, as each look takes the core from whoever computes there, for long on a virtual machine.
constexpr uint64_t kFirstNapNs = 50'000, kLongestNapNs = 200'000, kNapsNs = 1'000'000;

// A waiting thread may spin only if every rank has a core to itself; else whoever spins keeps from working whom it
// waits for.
uint64_t most_spin_ns(const Config& config, const LocalRanks& local_ranks) {
  if (config.spin_us >= 0) return uint64_t(config.spin_us) * 1000;
  return local_ranks.size() > local_ranks.cores() ? 0 : 20'000;
}

}  // namespace

Loop::Loop(Peers& peers, const Config& config, const Inbox& inbox, Step step)
    : peers_(peers), inbox_(inbox), step_(std::move(step)), wait_habit_(most_spin_ns(config, peers.local_ranks())) {}

void Loop::start() {
  thread_ = std::thread([this] { run(); });
}

void Loop::stop() {
  stopping_ = true;
  wake_thread();
  peers_.wake_own_driver();
  thread_.join();
  wait_for_lock();
}

// ---- the progress lock

void Loop::wait_for_lock() {
  while (!lock_.try_lock()) sched_yield();
}

bool Loop::wait_for_lock(uint64_t timeout_ns) {
  for (const uint64_t begin = now_ns(); !lock_.try_lock(); sched_yield())
    if (stopping_ || now_ns() - begin > timeout_ns) return false;
  return true;
}

bool Loop::drive(Sleeper who) {
  bool moved = false;
  do {
    if (!lock_.try_lock()) return moved;
    moved |= step_(who);
    lock_.unlock();
  } while (inbox_.full());  // submitted while we held the progress lock
  return moved;
}

// ---- callers

// In a burst of small requests each step takes along what has gathered since the last; whoever waits drives at once.
void Loop::submitted(uint64_t now_ns, int64_t bytes, bool will_wait, bool comes_back) {
  if (comes_back) note_visit();
  const uint64_t since_step_ns = now_ns - driven_ns_.load(std::memory_order_relaxed);
  if (!will_wait && hold::for_next_step(since_step_ns, bytes)) return;
  driven_ns_.store(now_ns, std::memory_order_relaxed);
  drive();
}

bool Loop::wait(const std::atomic<bool>& finished, uint64_t deadline_ns, const std::function<void(uint64_t)>& idle) {
  note_visit();
  waiters_.fetch_add(1);
  SpinPolicy patience(wait_habit_);
  while (!finished.load(std::memory_order_acquire)) {
    if (drive()) {
      patience.reset();
    } else if (!patience.wait_a_little()) {
      const uint64_t now = now_ns();
      if (now >= deadline_ns) break;
      if (waiters_ == 1) idle(now);
      sleep(Sleeper::caller, std::min(deadline_ns - now, kTickNs), finished);
      patience.reset();
    }
  }
  const int others = waiters_.fetch_sub(1) - 1;
  if (others > 0) peers_.wake_own_driver();  // one of them watches the network from now on
  else if (inbox_.in_flight() > 0 || peers_.network_busy() || nobody_watches_network()) wake_thread();
  return finished.load(std::memory_order_acquire);
}

void Loop::sleep(Sleeper who, uint64_t timeout_ns, const std::atomic<bool>& finished) {
  peers_.sleep(who, peers_.own().driver, polls_ ? kPollNs : timeout_ns, [&] {
    if (finished || (who == Sleeper::engine_thread && waiters_ > 0)) return true;
    // Only a step that ran after we said that we sleep proves that there is nothing to do.
    if (!lock_.try_lock()) return true;
    const bool moved = step_(who);
    lock_.unlock();
    return moved || inbox_.full();
  });
}

// ---- the engine's thread

void Loop::run() {
  prctl(PR_SET_NAME, "lightcc-engine");
  while (!stopping_) {
    if (!needed()) {
      nap_or_park();
    } else if (lock_.is_held()) {
      nap(kFirstNapNs);  // a caller makes steps, and needs its core
    } else if (!drive(Sleeper::engine_thread)) {
      sleep(Sleeper::engine_thread, kTickNs, stopping_);
    }
  }
}

// There is work, no caller waits, and none has come by since the last look: a framework that calls often makes the
// steps itself, and its core is better left to it.
bool Loop::needed() {
  const uint32_t visits = visits_.load(std::memory_order_relaxed);
  return std::exchange(visits_seen_, visits) == visits && inbox_.in_flight() > 0 && waiters_ == 0;
}

// While callers wait they make the steps and one of them watches the network, so this thread does neither; the last
// of them to go rings it.
void Loop::nap_or_park() {
  const auto alarmed = [&] { return peers_.own().alarm != 0; };  // rung while this thread was not asleep
  const auto wanted = [&] { return stopping_ || alarmed() || (inbox_.in_flight() > 0 && waiters_ == 0); };
  const bool watches = watches_;
  for (uint64_t spent_ns = 0, nap_ns = kFirstNapNs; spent_ns < kNapsNs; spent_ns += nap_ns) {
    const uint32_t seen = visits_seen_;
    if (stopping_ || needed()) return;
    // Each caller that leaves would wake this thread to watch the network; while they come often it stays up instead.
    if (!peers_.all_local() && visits_seen_ != seen) spent_ns = 0;
    if (alarmed()) break;
    const bool watched = waiters_ == 0 && peers_.network_busy();
    if (watched) drive(Sleeper::engine_thread);
    if (watched || inbox_.in_flight() > 0) nap_ns = kFirstNapNs;
    nap(nap_ns);
    nap_ns = std::min(2 * nap_ns, kLongestNapNs);
  }
  if (waiters_ > 0)
    own_engine().sleep(kTickNs, [&] { return wanted() || waiters_ == 0; });
  else
    peers_.sleep(Sleeper::engine_thread, own_engine(), watches ? kWatchNs : holds_ ? kTickNs : kNoTimeout,
                 [&] { return wanted() || waiters_ > 0 || watches_ != watches; });
  drive(Sleeper::engine_thread);  // a peer may have rung: it asks something, or leaves
}

// A ring that comes just before the thread sleeps is missed, which costs a nap.
void Loop::nap(uint64_t ns) {
  nap_.sleep(ns, [] { return false; });
}

void Loop::note_signs(bool holds, bool watches, bool polls) {
  lock_.assert_held();
  holds_.store(holds, std::memory_order_relaxed);
  polls_.store(polls, std::memory_order_relaxed);
  if (watches == watches_.load(std::memory_order_relaxed)) return;
  watches_.store(watches);
  if (watches) peers_.wake_own_engine();  // it may sleep without end
}

bool Loop::nobody_watches_network() {
  return !peers_.all_local() && own_engine().sleepers.load(std::memory_order_seq_cst) > 0;
}

void Loop::wake_thread(bool from_nap) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (from_nap) nap_.ring();
  peers_.wake_own_engine();
  if (inbox_.full()) peers_.wake_own_driver();  // with work in flight it sleeps there, as callers do
}

}  // namespace lightcc
