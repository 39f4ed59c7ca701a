// The engine of one rank. Its state belongs to whoever holds the baton, a try-lock: submit() takes it if it is
// free and makes one step, wait() drives until its request is done, and the engine thread drives while the
// framework computes. Nobody holds it asleep. Everything public may be called from any thread.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "base/clock.h"
#include "base/trace.h"
#include "engine/channel.h"
#include "engine/dispute.h"
#include "engine/judge.h"
#include "net/world.h"

namespace lightcc {

struct Call {                    // an allreduce of one tensor, as lightcc_submit() gets it; outlives the call only
  int group;
  const char* name;              // nullptr: automatic
  const void* input;
  void* output;
  DType dtype;
  std::span<const int64_t> shape;
  ReduceOp op;
  double pre, post;
  Callbacks callbacks = {};      // for what is begun here and ends elsewhere
};

class Engine : public ChannelOwner {
 public:
  // timeline: one that runs already, or nothing.
  Engine(std::unique_ptr<Peers>, World, Config, std::unique_ptr<Timeline> timeline = nullptr);
  ~Engine();  // shuts down if shutdown() was not called

  const World& world() const { return world_; }
  const Config& config() const { return config_; }
  const Counters& counters() const { return counters_; }
  std::string describe_selector() const { return Selector(true, config_.select).text(); }
  Timeline& timeline() { return *timeline_; }
  const Topology& topology() const { return peers_->topology(); }
  const std::shared_ptr<Arena>& arena() const { return peers_->arena(); }

  // Checks what this rank can know by itself (Error{invalid_argument}), completes key and average, and sends
  // it on its way. Will the caller wait at once? Then no thread is woken.
  void submit(const RequestPtr&, bool will_wait);
  // The same for a caller that will wait at once, by engine/express.h if it can be. True: it is done. False: wait for
  // *begun; or, if that is nullptr, nothing has happened: submit() it.
  bool express(const Call&, RequestPtr* begun);
  bool wait(Request&, uint64_t deadline_ns);   // false: not finished by then
  bool poll(Request&);                         // finished at entry?

  std::vector<int> group_ranks(int group) const;  // empty: no such group
  std::vector<int> group_ids() const;

  void abort(const std::string& cause);        // ends the epoch on all ranks
  void peer_ended(int rank);                   // its process is gone; any thread
  void shutdown();
  // Around fork(): what a child closes must be whole. False: somebody was busy for too long, it closes less.
  bool pause();
  void resume() { baton_.store(false); }
  void close_in_child(bool paused);            // only this may be called there

 private:
  using Failure = std::pair<Code, std::string>;
  void finish(const RequestPtr&, Code, const std::string& text) override;
  void skip_name(int group, const std::string& key) override;
  void change_groups(Request&) override;
  void end_epoch(Code, const std::string& text) override;
  void has_left(int rank) override;
  void judge(const Message&) override;
  void accused(const Accuse& accuse) override { disputes_.accuse(accuse); }

  void join(const RequestPtr&);
  bool join_goes_on(const RequestPtr&, Code, const std::string& text);
  void name_automatically(Request&);           // "noname.7": numbered by group and kind; under the mutex
  Channel* begin_express(const Call&, uint64_t* number);  // nullptr: it cannot be. Both under the baton
  Express::State step_express(Express&);
  bool drive();                                // one step, if nobody else is at it
  bool step();
  bool take_inbox();
  std::unique_ptr<Watch> watch();
  void hear(Code, const std::string& text);    // the epoch has ended elsewhere; any thread
  void host_lost(int host);                    // any thread
  void host_unheard(int host);                 // any thread
  void look_at_peers();
  void look_at_news();
  void ring_mates();                           // the ranks of this host
  void end_when_quiet(bool moved);
  void flush();
  void say_goodbye();
  void leave_network(bool failed);
  // Until someone rings, unless there is work or `finished` says that there is no need.
  void sleep(uint64_t timeout_ns, const std::atomic<bool>& finished);
  void run();                                  // the engine thread
  bool needed();
  bool network_busy() { return peers_->network() && peers_->network()->busy(); }
  void nap_or_park();
  void wake_engine_thread();
  void look_for_dispute(const Request&);
  bool go_on_with_disputes();
  void answer(const Accuse&);
  void stay_away();
  void finish_dispute(const Request&, Code, const std::string& text);
  Bell& own_driver() { return peers_->own().driver; }
  Bell& own_engine() { return peers_->own().engine; }

  std::unique_ptr<Peers> peers_;
  const World world_;
  const Config config_;
  Counters counters_;
  const std::unique_ptr<Timeline> timeline_;
  Tracing tracing_{*timeline_};
  SpinHabit spin_habit_;

  // Under the baton.
  std::atomic<bool> baton_{false};
  std::map<int, std::unique_ptr<Channel>> channels_;
  std::deque<int> free_groups_;
  uint64_t inspected_ns_ = 0;
  Disputes disputes_;
  Judge judge_;                                // used by the world's coordinator only
  std::vector<char> left_;                     // by rank
  std::optional<Failure> ending_;              // a peer ended the epoch in peace: what can still finish, does
  RequestPtr join_;                            // in flight; it is announced in every channel
  int join_parts_ = 0;                         // channels in which not all have joined
  uint64_t ending_ns_ = 0, moved_ns_ = 0;      // since when, and when anything last moved

  // Under the mutex.
  mutable std::mutex mutex_;
  std::vector<RequestPtr> inbox_;
  std::unordered_set<std::string> in_flight_;  // "group/key"
  std::map<int, std::vector<int>> groups_;
  std::map<std::pair<int, Kind>, uint64_t> automatic_;
  std::optional<Failure> failure_;             // the epoch's end
  std::optional<Failure> heard_;               // ... on a rank of another host
  std::vector<int> lost_hosts_, unheard_hosts_;
  bool joining_ = false;                       // nothing is submitted until join() returns

  std::atomic<bool> inbox_full_{false}, stopping_{false}, over_{false};
  bool told_ = false;                          // who is elsewhere knows why the epoch ends; under the baton
  std::atomic<int> outstanding_{0}, waiters_{0};
  std::atomic<bool> holds_{false};             // a relay here holds what others have said, for a while
  std::atomic<uint64_t> driven_ns_{0};         // when a submission last made a step
  std::atomic<uint32_t> visits_{0};            // calls of the framework that made a step themselves
  std::vector<std::atomic<bool>> ended_;       // by rank: its process
  uint32_t visits_seen_ = 0;                   // the engine thread's
  std::unique_ptr<Watch> watch_;
  std::thread thread_;
};

}  // namespace lightcc
