// All ranks of the epoch as one of them sees them, by world rank: those of this host through shared memory
// (shm/local_ranks.h), all others through transports (transport.h). A caller need not know which is which, unless it
// asks.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "net/health/heartbeat_socket.h"
#include "net/shm/local_ranks.h"
#include "net/topology.h"
#include "net/transport.h"

namespace lightcc {

struct NamedTransport {
  std::string name;            // as contacts call it
  std::unique_ptr<Transport> transport;
  bool only_watches = false;   // no route leads over it: it tells which peers have died
};

class Peers {
 public:
  explicit Peers(std::unique_ptr<LocalRanks>);  // all ranks share this host
  // contacts: of all ranks, by world rank. A rank of another host is reached through the first of the transports for
  // which it has an address. heartbeats: of the hosts, or nullptr. Throws Error{internal} if a rank has no address.
  Peers(int rank, Topology, const std::vector<Contact>& contacts, std::unique_ptr<LocalRanks>,
        std::vector<NamedTransport>, std::unique_ptr<HeartbeatSocket> heartbeats);

  int rank() const { return rank_; }
  int size() const { return topology_.ranks(); }
  const Topology& topology() const { return topology_; }
  const std::string& name(int rank) const { return names_[size_t(rank)]; }  // "rank 1 (pid 17) on host h"
  bool is_local(int rank) const { return topology_.share_host(rank, rank_); }
  bool all_local() const { return transports_.empty(); }

  // What only ranks of this host have. local_index(): among them; header(): of a rank that is local.
  LocalRanks& local_ranks() { return *local_ranks_; }
  const LocalRanks& local_ranks() const { return *local_ranks_; }
  int local_index(int rank) const { return topology_.local[size_t(rank)]; }
  const std::vector<int>& ranks_on_this_host() const {
    return topology_.hosts[size_t(topology_.host_of[size_t(rank_)])];
  }
  Header& header(int rank) const { return local_ranks_->header(local_index(rank)); }
  Header& own() const { return header(rank_); }
  const std::shared_ptr<Arena>& arena() const { return local_ranks_->arena(); }

  // Group slot `group` < LocalRanks::kGroups, lane < LocalRanks::kLanes; one link for each (group, lane, peer). Only
  // the engine's thread of the moment uses them.
  std::unique_ptr<Link> control_link(int group, int peer);
  std::unique_ptr<Link> data_link(int group, int lane, int peer);
  std::unique_ptr<Link> point_to_point_link(int group, int peer);  // which may be this rank
  void reset_group(int group);       // once every member has left it

  HeartbeatSocket* heartbeats() { return heartbeats_.get(); }  // nullptr: there are none
  // How long ago a rank with work in flight last looked around, if that is known.
  std::optional<uint64_t> awake_ns_ago(int rank, uint64_t now_ns) const;
  bool step();                       // what the transports can do without waiting
  void flush_and_wake();             // wakes all ranks of this host that were marked, and sends what was committed
  void wake_urgently(int peer);      // to look around, also if it has nothing to do; of another host: it will anyway
  void wake_own_driver() { local_ranks_->wake_driver(local_ranks_->rank()); }
  void wake_own_engine() { local_ranks_->wake_engine(local_ranks_->rank()); }

  // These call all transports (transport.h). probe calls the one that watches, or else the one that leads to the peer.
  bool network_busy() const;
  uint64_t sent_bytes(const std::string& transport) const;  // 0 if there is none of that name; any thread
  NetworkFaults network_faults();                // of all transports
  void probe(int peer);
  void mark_left(int peer);
  void end_links(const Error& cause);
  bool finish_links();
  void close_links();
  void close_in_child(bool transports_are_whole);
  void wait_for_network(uint64_t timeout_ns);

  // As Doorbell::sleep; but one thread at a time, the poller, also wakes when a transport has something to do. A caller
  // takes that role from the engine thread: data must wake whom they are for. Any thread.
  enum class Sleeper { caller = 1, engine_thread };
  template <class Look> void sleep(Sleeper who, Doorbell& doorbell, uint64_t timeout_ns, Look look) {
    if (all_local()) return doorbell.sleep(timeout_ns, look);
    if (!become_poller(who)) return doorbell.sleep(timeout_ns, [&] { return poller_ == kNobody || look(); });
    doorbell.poll(look, [&] { poll_transports(timeout_ns, local_ranks_->event()); });
    local_ranks_->clear_event();
    poller_ = kNobody;
    if (who == Sleeper::caller) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);
    wake_own_driver();  // a caller may wait for it
  }

 private:
  static constexpr size_t kMostTransports = 4;
  static constexpr uint64_t kWatchNs = 1'000'000;  // a transport that only watches has no more to do
  Transport& route(int peer) { return *route_[size_t(peer)]; }
  int serial(int group) const { return group + LocalRanks::kGroups * generation_[size_t(group)]; }
  bool is_time_to_watch();
  bool become_poller(Sleeper);       // false: another thread is; if that is the engine thread, it is on its way out
  void poll_transports(uint64_t timeout_ns, int also);

  std::unique_ptr<LocalRanks> local_ranks_;
  Topology topology_;
  int rank_;
  std::vector<std::string> names_;
  std::vector<NamedTransport> transports_;
  std::vector<Transport*> route_;    // by rank; nullptr: it is local
  uint64_t watched_ns_ = 0;          // when transports that only watch last made a step
  std::unique_ptr<HeartbeatSocket> heartbeats_;
  std::vector<int> generation_ = std::vector<int>(LocalRanks::kGroups);  // how often a group slot was used before
  static constexpr int kNobody = 0;
  std::atomic<int> poller_{kNobody};  // or a Sleeper: that thread sleeps on the network
};

}  // namespace lightcc
