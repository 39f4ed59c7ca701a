// Who makes an engine's steps, and who sleeps: the callers that wait, or the engine's thread while the framework
// computes. It knows of the engine that step() says whether anything moved, and of the inbox whether there is work.
// Invariants:
// 1. Steps are made under the progress lock, which is only ever tried: nobody sleeps with it, or for it.
// 2. Whoever says that it sleeps makes one more step first: what was rung before is not missed.
// 3. While callers wait they make the steps, and one of them watches the network; else the engine's thread does both.
// Any thread may call everything, but for what says otherwise.
#pragma once
#include <atomic>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/config.h"
#include "engine/loop/progress_lock.h"
#include "engine/request/inbox.h"
#include "net/peers.h"

namespace lightcc {

class Loop {
 public:
  using Sleeper = Peers::Sleeper;
  using Step = std::function<bool(Sleeper)>;            // under the progress lock; true if anything moved

  Loop(Peers&, const Config&, const Inbox&, Step);      // which outlive it
  void start();                                         // the engine's thread
  void stop();                                          // it ends, and the caller keeps the progress lock for good
  bool is_stopping() const { return stopping_; }

  // ---- the progress lock
  ProgressLock& lock() { return lock_; }
  void wait_for_lock();                                 // by a thread that knows that stop() is not called
  bool wait_for_lock(uint64_t timeout_ns);              // false: the time is over, or stop() was called
  bool drive(Sleeper = Sleeper::caller);                // one step, if nobody else is at it

  // ---- callers
  // One that two threads make at once may be lost: it is asked only whether there were any.
  void note_visit() { visits_.store(visits_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  // Something was submitted, of so many bytes. will_wait: by a caller that waits at once. comes_back: it makes steps
  // for it later, as it waits or polls; else the engine's thread does.
  void submitted(uint64_t now_ns, int64_t bytes, bool will_wait, bool comes_back);
  // idle: told the time before each sleep of a caller that is the only one. False: not finished by the deadline.
  bool wait(const std::atomic<bool>& finished, uint64_t deadline_ns, const std::function<void(uint64_t)>& idle);
  void wake_thread(bool from_nap = false);              // also if it would soon look by itself
  WaitHabit& wait_habit() { return wait_habit_; }

  // What the last step has found, for who sleeps; under the progress lock. holds: an aggregator here holds what others
  // have sent, for a while. watches: a GPU, which NCCL keeps busy. polls: NCCL, which rings nobody.
  void note_signs(bool holds, bool watches, bool polls);

 private:
  // Until someone rings, unless there is work or `finished` says that there is no need.
  void sleep(Sleeper, uint64_t timeout_ns, const std::atomic<bool>& finished);
  void run();
  bool needed();
  void nap_or_park();
  void nap(uint64_t ns);
  bool nobody_watches_network();                        // callers did, and the last of them has gone
  Doorbell& own_engine() { return peers_.own().engine; }

  Peers& peers_;
  const Inbox& inbox_;
  const Step step_;
  ProgressLock lock_;
  WaitHabit wait_habit_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> waiters_{0};
  std::atomic<bool> holds_{false}, watches_{false}, polls_{false};
  std::atomic<uint64_t> driven_ns_{0};                  // when a submission last made a step
  std::atomic<uint32_t> visits_{0};                     // calls of the framework that made a step themselves
  uint32_t visits_seen_ = 0;                            // the engine thread's
  Doorbell nap_;                                        // its alone
  std::thread thread_;
};

}  // namespace lightcc
