// What is behind the facade of engine.h: the engine of one rank. Its state belongs to whoever holds the progress lock,
// a try-lock. submit() makes steps if the lock is free, unless the request gathers with others for a later step or is
// left to the engine thread. wait() drives until its request is done; the engine thread drives while the framework
// computes. Nobody sleeps while holding the lock.
#pragma once
#include <functional>
#include <map>
#include <optional>
#include <thread>

#include "base/clock.h"
#include "base/deadline.h"
#include "engine/timeline/trace.h"
#include "engine/negotiate/blocked_state.h"
#include "engine/lifecycle/calibrated.h"
#include "engine/negotiate/control/deadlock_detector.h"
#include "engine/request/effects.h"
#include "engine/engine.h"
#include "engine/lifecycle/epoch_state.h"
#include "engine/negotiate/group_engine.h"
#include "engine/request/group_table.h"
#include "engine/lifecycle/health_events.h"
#include "engine/request/inbox.h"
#include "engine/loop/progress_lock.h"
#include "engine/negotiate/surroundings.h"
#include "net/bootstrap/world.h"
#include "net/health/process_watch.h"

namespace lightcc {

class Engine::Impl {
 public:
  Impl(std::unique_ptr<Peers>, World, Config, std::unique_ptr<Timeline>);
  ~Impl() { shutdown("it shut down", nullptr); }

  const World& world() const { return world_; }
  const Config& config() const { return config_; }
  const Counters& counters() const { return counters_; }
  uint64_t sent_bytes(const std::string& transport) const {  // since the counters were reset
    const uint64_t all = peers_->sent_bytes(transport);
    return all - std::min<uint64_t>(all, sent_bytes_before_);
  }
  const std::string& selector_text() const { return selector_text_; }  // of the whole world's
  const std::string& network_text() const { return calibrated_.network; }  // empty: nothing was measured
  Timeline& timeline() { return *timeline_; }
  const Topology& topology() const { return peers_->topology(); }
  const std::shared_ptr<Arena>& arena() const { return peers_->arena(); }
  const std::shared_ptr<OutputPool>& outputs() const { return outputs_; }

  void submit(const RequestPtr&, bool will_wait);
  void submit_all(std::span<const RequestPtr>, size_t* begun);
  void fill(std::span<const Fill>);
  bool try_fast_path(const Call&, RequestPtr* begun);
  bool wait(Request&, uint64_t deadline_ns);
  bool poll(Request&);
  void give_back(Request&);

  void with_peers(const std::function<void(Peers&)>&);
  void use(Calibrated);
  void reset_counters();

  std::shared_ptr<const Group> group(int id) const { return groups_.find(id); }
  std::vector<int> group_ids() const { return groups_.ids(); }

  std::string plans_text();
  std::string failure() const { return inbox_.failure(); }
  void abort(const std::string& cause);
  void peer_ended(int rank);
  void shutdown(const std::string& reason, const Cancellation*);
  bool pause();
  void resume() { progress_lock_.unlock(); }
  void close_in_child(bool paused);

 private:
  void carry_out_effects();                    // of calls of group engines
  void finish(const RequestPtr&, Code, const std::string& text);
  void change_groups(Request&);
  void end_epoch(Code, const std::string& text);  // by a failure of this rank
  void await_turn(const Group&);

  std::unique_ptr<GroupEngine> make_group_engine(std::shared_ptr<const Group>);
  struct StreamMark {
    DevicePlace place;
    std::shared_ptr<CudaEvent> event;
  };
  const CudaFunctions& functions_for(const Request&);
  [[noreturn]] void end_by_device(const Error&);
  void note_stream(Request&, StreamMark* last);
  int take_in(const RequestPtr&, uint64_t now_ns, bool will_wait, StreamMark* last = nullptr);
  void join(const RequestPtr&);
  bool join_goes_on(const RequestPtr&, Code, const std::string& text);
  void report_refusal(const Request&, const std::string& why, bool contended = false);
  // Is a call of this name on the fast path, of another thread then?
  bool is_on_fast_path(const Request&) const;
  void submit_to(GroupEngine&, const RequestPtr&);
  // nullptr: the call cannot take it.
  GroupEngine* begin_fast_path(const Call&, uint64_t* number);
  FastPath::State step_fast_path(GroupEngine&);
  // One that two threads make at once may be lost: it is asked only whether there were any.
  void note_visit() { visits_.store(visits_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  using Sleeper = Peers::Sleeper;
  bool drive(Sleeper who = Sleeper::caller);   // one step, if nobody else is at it
  bool step(Sleeper);
  // What `body` throws ends the epoch: links and transports throw when a peer is lost. Its effects are carried out.
  template <class Body> void end_epoch_on_error(Body body);
  template <class Body> void attempt(Body body);
  void step_groups(bool& moved);
  bool take_inbox();
  std::unique_ptr<ProcessWatch> watch();
  void remote_failure(Code, const std::string& text);  // the epoch has ended elsewhere; any thread
  void host_lost(int host);                            // any thread
  void host_spared(int host) const;                    // any thread
  void host_unheard(int host);                         // any thread
  void look_at_peers();
  void take_health_events();
  // Without a verdict of our own watch, what was thrown ends the epoch.
  void suspect(const PeerSuspected&);
  void await_verdict(bool& moved);
  void ring_local_ranks();                     // the ranks of this host
  EpochAction apply(const EpochEvent&);
  void carry_out_end(bool tell);               // tell: the other hosts do not know it yet
  void flush();
  void send_leave_message(const std::string& text);
  void leave_network(bool failed, const Cancellation*);
  // Until someone rings, unless there is work or `finished` says that there is no need.
  void sleep(Sleeper, uint64_t timeout_ns, const std::atomic<bool>& finished);
  void run();                                  // the engine thread
  bool needed();
  void nap_or_park();
  void wake_engine_thread();
  bool nobody_watches_network();               // callers did, and the last of them has gone
  void report_if_blocked(const Request&, uint64_t now_ns);
  bool detect_deadlocks();
  void answer(const DeadlockProbe&);
  void declare_absent();
  void finish_deadlock(const Request&, Code, const std::string& text);
  Doorbell& own_driver() { return peers_->own().driver; }
  Doorbell& own_engine() { return peers_->own().engine; }

  std::unique_ptr<Peers> peers_;
  const World world_;
  const Config config_;
  const std::shared_ptr<OutputPool> outputs_;
  const std::shared_ptr<PinnedPool> pinned_;
  std::string selector_text_;
  Calibrated calibrated_{};
  Counters counters_;
  std::atomic<uint64_t> sent_bytes_before_{0};
  const std::unique_ptr<Timeline> timeline_;
  Tracing tracing_{*timeline_};
  WaitHabit wait_habit_;

  // Under the progress lock, as its users assert.
  ProgressLock progress_lock_;
  NcclLaunches launches_;
  Effects effects_;
  uint64_t inspected_ns_ = 0;
  BlockedState blocked_state_;
  DeadlockDetector deadlock_detector_;         // used by the world's coordinator only
  EpochState epoch_;
  struct Suspicion {
    EpochCause cause;
    uint64_t until_ns;
  };
  std::optional<Suspicion> suspicion_;         // until then no batch makes a step
  RequestPtr join_;                            // in flight; it is announced in every group engine
  int join_parts_ = 0;                         // group engines in which not all have joined

  // Any thread may use these.
  Inbox inbox_;
  GroupTable groups_;
  const Surroundings surroundings_{groups_, deadlock_detector_};
  // Under the progress lock; here, since they end before what they refer to.
  std::map<int, std::unique_ptr<GroupEngine>> group_engines_;

  HealthEvents health_events_;
  std::atomic<bool> stopping_{false};          // shutdown() has begun
  std::atomic<int> waiters_{0};
  std::atomic<int> gpus_{-1};                  // in this process; -1: nobody has asked
  std::atomic<bool> awaits_planned_{false};    // a caller waits for a request that came to a fusion plan
  std::atomic<bool> holds_{false};             // an aggregator here holds what others have sent, for a while
  std::atomic<bool> watches_{false};           // a GPU, which NCCL keeps busy
  std::atomic<bool> polls_{false};             // NCCL, which rings nobody
  std::atomic<uint64_t> driven_ns_{0};         // when a submission last made a step
  std::atomic<uint64_t> fast_path_name_{0};    // hash of the name of the call whose caller makes its steps; 0: none
  std::atomic<uint32_t> visits_{0};            // calls of the framework that made a step themselves
  uint32_t visits_seen_ = 0;                   // the engine thread's
  std::unique_ptr<ProcessWatch> watch_;
  std::thread thread_;
};

template <class Body> void Engine::Impl::end_epoch_on_error(Body body) {
  attempt(body);
  attempt([&] { carry_out_effects(); });
}

template <class Body> void Engine::Impl::attempt(Body body) {
  try {
    body();
  } catch (const PeerSuspected& error) {
    suspect(error);
  } catch (const Error& error) {
    end_epoch(error.code(), error.what());
  } catch (const std::exception& error) {
    end_epoch(Code::internal, error.what());
  }
}

}  // namespace lightcc
