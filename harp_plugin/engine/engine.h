// The thread around one port and one endpoint, and what the application's threads ask of it.
//
// The holder of the progress lock runs a round: packets in, submissions, timers, packets out. In threaded mode only the
// engine's own thread ever does. In inline mode the application's threads do while they poll, and the engine's thread
// looks after a process that does not poll. Members of the second half of the class belong to the holder of the lock.
//
// Invariants:
//   1. Memory of a request that ended in failure, and of a connection that was closed, is given back only when the port
//      has let go all packets that it was given, and those that it did not take yet.
//   2. Memory of a request that ended well is given back only when no packet waits here that could point into it.
//   3. A thread sleeps only after it said so and then saw no submission and no command: the submitting thread rings it.
#pragma once
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "harp_plugin/core/endpoint.h"
#include "harp_plugin/engine/channel.h"
#include "harp_plugin/engine/control.h"
#include "harp_plugin/engine/core_claim.h"
#include "harp_plugin/engine/notifier.h"
#include "harp_plugin/port/port.h"

namespace harp {

// Connections that have come to a listener and wait to be accepted.
using AcceptQueue = Guarded<std::deque<std::unique_ptr<Channel>>>;

class Engine final {
 public:
  struct Settings {
    int index = 0;
    bool runs_inline = false;
    bool only_polled = false;  // inline, but not in calls that look at a connection
    bool oversubscribed = false;  // fewer cores than threads that want one: a thread that polls in vain yields
    std::optional<CoreClaim> core = std::nullopt;  // that its thread is pinned to
    uint64_t spin_ns = 5'000; // at most, before its thread offers its core and then sleeps
    std::function<std::string(const Address&)> name_of_peer;
    std::function<uint64_t()> random;
    Notifier* notifier = nullptr;  // hears of what is done for the application
  };
  Engine(std::unique_ptr<Port>, const Options&, Settings);
  ~Engine();  // all its channels are closed; waits a moment so that their peers hear of it

  // Any thread. These wait until it is done.
  Nonce listen(AcceptQueue&);
  void stop_listening(const Nonce&);
  void cancel(Channel&);  // afterwards no memory of its requests is touched, and later ones fail
  void close(Channel&);   // afterwards nothing refers to it either
  void run(std::function<void()> command);         // for the holder of the progress lock, between two rounds
  void run_fenced(std::function<void()> command);  // and then until the port has let go of all it was given so far
  // These do not.
  void connect(Channel&, const Address&, const Nonce&);
  void poll();                  // inline mode: a round, if nobody else is at it
  void poll_in_passing() {      // for a thread that looks at a connection
    if (!settings_.only_polled) poll();
  }
  bool under_way() const { return under_way_.load(std::memory_order_relaxed); }  // at the end of the last round
  // Inline mode, before the polling thread sleeps on the port: until when at most. Nothing: there is something to do.
  std::optional<uint64_t> arm();
  void notice(Channel&);        // it has submissions

  const Caps& caps() const { return port_->caps(); }
  const Options& options() const { return options_; }
  bool runs_inline() const { return settings_.runs_inline; }
  int port_descriptor() const { return port_->descriptor(); }  // -1: it has none
  int index() const { return settings_.index; }
  int load() const { return load_.load(std::memory_order_relaxed); }
  Port& port() { return *port_; }                                            // in commands only
  Counters counters(const Channel& channel) const;                          // in commands only
  const Counters& strays() const { return endpoint_.strays(); }              // in commands only

 private:
  static constexpr size_t kBatch = kMostExpected;
  static constexpr int kBatchesARound = 4;

  // engine.cc: a round and what it consists of.
  bool round();  // whether anything came, or is left to do: what timers had sent is no reason to stay awake
  size_t receive();
  void release();
  bool submissions(uint64_t now_ns);
  void drain(Channel&, uint64_t now_ns);
  bool transmit(uint64_t now_ns);  // whether there may be more
  void offer_kept();
  void keep(size_t from, size_t count);
  void settle();
  void publish(uint64_t now_ns);
  bool try_round(bool* busy);
  void carry_out_events();  // of the endpoint: after every call to it that may have any
  void carry_out(const event::Opened&);
  void carry_out(const event::Completed&);
  void carry_out(const event::Received&);
  void carry_out(const event::Failed&);
  void complete(Request&, const Completion&);
  // commands.cc
  bool commands();
  void end(Channel&);
  void unlist(Channel&);
  void give_up(Channel&, Status, const std::string& why);
  // thread.cc
  void wake() {
    if (sleeping_.load(std::memory_order_seq_cst)) ring();
  }
  void ring();
  void thread();
  bool attend(uint64_t polls);
  void sleep();
  std::optional<uint64_t> arm_port();
  void block(uint64_t until_ns, bool port_too);
  void say_goodbye();

  const Settings settings_;
  std::atomic<int> load_{0};
  std::atomic<bool> stopping_{false};
  lightcc::Fd bell_;  // an eventfd: wakes the thread
  Mailbox mailbox_;
  alignas(kCacheLine) std::atomic<Channel*> queued_{nullptr};
  alignas(kCacheLine) std::atomic<bool> sleeping_{false};
  alignas(kCacheLine) std::atomic<uint64_t> polls_{0};
  alignas(kCacheLine) std::atomic_flag progress_lock_;
  std::atomic<bool> under_way_{false};

  // The holder of the progress lock's.
  struct Fenced {  // waits until the port has taken, or let go, so many packets
    uint64_t packets;
    bool let_go;
    Request* request;
    Completion completion;
    Acknowledgement* acknowledgement;
  };
  std::unique_ptr<Port> port_;
  Options options_;
  Endpoint endpoint_;
  std::unordered_map<ConnectionId, Channel*> channels_;
  std::map<Nonce, AcceptQueue*> listeners_;
  std::vector<ConnectionId> orphans_;  // opened for a listener that is gone
  std::vector<RxPacket> rx_;
  std::vector<TxPacket> tx_;
  std::array<Address, kBatch> kept_to_;
  size_t kept_ = 0, kept_end_ = 0;  // tx_[kept_..kept_end_) were not taken by the port yet
  uint64_t taken_ = 0;              // packets that the port took, ever
  std::deque<Fenced> fenced_;
  bool armed_ = false;              // the port's doorbell
  uint64_t published_ns_ = 0;
  bool unpublished_ = false;
  bool news_ = false;               // for the notifier, at the end of the round
  lightcc::WaitHabit habit_;
  std::thread thread_;
};

}  // namespace harp
