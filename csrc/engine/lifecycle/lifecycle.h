// How an engine's epoch goes on and ends: by shutdown here, by a peer that left, failed or died, or by an interrupt.
// What that means epoch_state.h decides; here is where its events come from, and what is done about them. In order:
//
//   an end   | this rank's header says why, and its arena is out of reach of ranks that may still be writing
//            | nothing more is taken in; links end; the other hosts are told
//            | NCCL is aborted; what is in flight fails, join() last (as effects); the ranks of this host are rung
//   shutdown | nothing more is taken in, and the engine's thread ends (loop/)
//            | what is owed is sent; NCCL's queues end; the other hosts hear why this rank leaves
//            | what is in flight fails, if there is anything: then the arena is out of reach first
//            | this rank's header says that it has left; the ranks of this host are rung; links end
//
// The members under "any thread" may be called by any; the others only by whoever holds the progress lock.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "engine/lifecycle/epoch_state.h"
#include "engine/lifecycle/health_events.h"
#include "engine/negotiate/process_sets.h"
#include "net/health/process_watch.h"

namespace lightcc {

class Cancellation;

class Lifecycle {
 public:
  // Everything outlives it.
  Lifecycle(const GroupResources&, ProcessSets&, Inbox&);

  // ---- any thread
  void watch();                                         // the other ranks, from now on
  void peer_ended(int rank);                            // its process is gone
  void close_in_child() const { if (watch_) watch_->close_in_child(); }

  // ---- what is so
  bool over() const { return state_.over(); }
  bool has_failed() const { return state_.phase == EpochState::Phase::failed; }
  const EpochCause& cause() const { return state_.cause; }
  bool is_suspended() const { return suspicion_.has_value(); }  // until it is known whether a peer has died

  // ---- what has happened
  EpochAction apply(const EpochEvent&);                 // and ends what there is to end; `leave` is the caller's
  void end(Code code, const std::string& text) { apply(epoch_event::OwnFailure{{code, text}}); }
  // Without a verdict of our own watch, what was thrown ends the epoch.
  void suspect(const PeerSuspected&);
  void await_verdict();                                 // a step meanwhile
  void stepped(bool moved, bool work_in_flight);
  void look_at_peers();                                 // one has rung: someone left, failed or died

  // ---- shutdown, in this order
  void settle();                                        // what this rank has agreed to with others must reach them
  void end_nccl();                                      // nothing is in flight: what it has queued may end
  std::string leave_text(const std::string& reason) const { return leave_message(state_, reason); }
  void tell_other_hosts(const std::string& leave_text);
  void fail_rest(bool unfinished);                      // what is in flight, if there is anything
  void leave(const std::string& leave_text, bool unfinished, const Cancellation*);

 private:
  void host_lost(int host);                             // these four: any thread
  void host_spared(int host) const;
  void host_unheard(int host);
  void ended_elsewhere(Code, const std::string& text);
  void take_health_events();
  void take_failures();
  void take_leavers();
  void flush();
  void carry_out_end(bool tell);                        // tell: the other hosts do not know it yet
  void ring_local_ranks();
  void leave_network(bool failed, const Cancellation*);

  const GroupResources& shared_;
  Peers& peers_;
  ProcessSets& sets_;
  Inbox& inbox_;
  EpochState state_;
  struct Suspicion {
    EpochCause cause;
    uint64_t until_ns;
  };
  std::optional<Suspicion> suspicion_;                  // until then no batch makes a step
  HealthEvents health_events_;
  std::unique_ptr<ProcessWatch> watch_;
};

}  // namespace lightcc
