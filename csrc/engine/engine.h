// The engine of one rank, as the rest of lightcc sees it. It takes requests and runs them
// with the other ranks', in the threads that wait for them or, while the framework computes, in one of its own.
// Everything may be called from any thread.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/request/call.h"

namespace lightcc {

class Arena;
class Cancellation;
class Group;
class OutputPool;
class Peers;
class Timeline;
struct Calibrated;
struct Config;
struct Counters;
struct FastPathFacts;
struct Topology;
struct NetworkFaults;
struct World;

class Engine {
 public:
  Engine(std::unique_ptr<Peers>, World, Config);
  Engine(std::unique_ptr<Peers>, World, Config, std::unique_ptr<Timeline>);  // that runs already; or nullptr
  ~Engine();  // shuts down if shutdown() was not called

  const World& world() const;
  const Config& config() const;
  const Counters& counters() const;
  uint64_t sent_bytes(const std::string& transport) const;  // since the counters were reset
  const std::string& selector_text() const;    // of the whole world's
  const std::string& network_text() const;     // empty: nothing was measured
  Timeline& timeline();
  const Topology& topology() const;
  const std::shared_ptr<Arena>& arena() const;
  const std::shared_ptr<OutputPool>& outputs() const;

  // Checks what this rank can know by itself (Error{invalid_argument}), completes key and average, and queues the
  // request. will_wait: the caller waits at once and drives the engine itself, so no thread is woken.
  void submit(const RequestPtr&, bool will_wait);
  // The same for several of one thread; how many are on their way when it throws, *begun says.
  void submit_all(std::span<const RequestPtr>, size_t* begun);
  // Copies into the one tensor of each, which is input and output: on a GPU queued on its stream.
  void fill(std::span<const Fill>);
  // The same for a caller that will wait at once, by engine/run/fast_path.h if it may be, as far as the caller knows.
  // True: it is done. False: wait for *begun; or, if that is nullptr, nothing has happened: submit() it.
  bool try_fast_path(const Call&, const FastPathFacts&, RequestPtr* begun);
  bool wait(Request&, uint64_t deadline_ns);   // false: not finished by then
  bool poll(Request&);                         // whether it had finished at entry; if not, makes steps
  void give_back(Request&);                    // its handle: its name is free as soon as it is done

  // Under the progress lock, between two steps of the engine. What `body` throws ends the epoch.
  void with_peers(const std::function<void(Peers&)>& body);
  void use(Calibrated);   // before anything was submitted
  void reset_counters();  // what the engine has done until then does not count

  std::shared_ptr<const Group> group(int id) const;  // nullptr: there is none
  std::vector<int> group_ids() const;

  std::string plans_text();                    // of all groups, for people
  std::vector<uint64_t> waited_ns();           // by rank, as Coordinator's; zeros on other ranks than 0
  NetworkFaults network_faults();
  void report(const std::string& text);        // to rank 0, in place of what this rank has reported before
  std::string reported(int rank);              // on rank 0: what it has reported last; "": nothing yet
  std::string failure() const;               // what ended the epoch; "" while it lasts
  void abort(const std::string& cause);        // ends the epoch on all ranks
  void peer_ended(int rank);                   // its process is gone; any thread
  // reason: why this rank leaves, for the others: "its program has ended". Cancelled, it waits for none of them.
  void shutdown(const std::string& reason = "it shut down", const Cancellation* = nullptr);
  // Around fork(): what a child closes must be whole. False: somebody was busy for too long, it closes less.
  bool pause();
  void resume();                               // by the thread that paused it
  void close_in_child(bool paused);            // only this may be called there

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace lightcc
