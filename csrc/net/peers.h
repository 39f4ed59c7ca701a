// All ranks of the epoch as one of them sees them, by world rank: those of this host through shared memory (host.h),
// all others through the network (tcp.h). Who uses it need not know which is which, unless it asks.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "net/heart.h"
#include "net/host.h"
#include "net/tcp.h"
#include "net/topology.h"

namespace lightcc {

struct Door {                  // where ranks of other hosts knock: one port, TCP for links, UDP for heartbeats
  Fd listener, beats;
};
Door open_door(const Address& at, Ports);

class Peers {
 public:
  explicit Peers(std::unique_ptr<Host>);  // all ranks share this host
  // contacts: of all ranks; those of this host are not connected to. from: where connections start, or no address.
  static std::unique_ptr<Peers> connected(const Terms&, int rank, const Topology&, const std::vector<Contact>& contacts,
                                          std::unique_ptr<Host>, Door, const Address& from);
  // Ranks as threads of one process on emulated hosts of so many ranks each, joined over loopback; for tests.
  static std::vector<std::unique_ptr<Peers>> threads(const std::vector<int>& ranks_of_hosts);

  int rank() const { return rank_; }
  int size() const { return topology_.ranks(); }
  const Topology& topology() const { return topology_; }
  const std::string& name(int rank) const { return names_[size_t(rank)]; }  // "rank 1 (pid 17) on host h"
  bool here(int rank) const { return topology_.share_host(rank, rank_); }
  bool all_here(const std::vector<int>& ranks) const;

  // What only ranks of this host have. local(): their index there; header(): of a rank that is here.
  Host& host() { return *host_; }
  const Host& host() const { return *host_; }
  int local(int rank) const { return topology_.local[size_t(rank)]; }
  std::vector<int> local(const std::vector<int>& ranks) const;
  const std::vector<int>& ranks_here() const { return topology_.hosts[size_t(topology_.host_of[size_t(rank_)])]; }
  Header& header(int rank) const { return host_->header(local(rank)); }
  Header& own() const { return header(rank_); }
  const std::shared_ptr<Arena>& arena() const { return host_->arena(); }

  // Group slot `group` < Host::kGroups; one each a (group, peer). Only the engine's thread of the moment uses them.
  std::unique_ptr<Link> control_link(int group, int peer);
  std::unique_ptr<Link> data_link(int group, int peer);
  void reset_group(int group);       // once every member has left it

  Network* network() { return network_.get(); }  // nullptr: all share this host
  Heart* heart() { return heart_.get(); }        // nullptr likewise
  // How long ago a rank with work in flight last looked around, if that is known.
  std::optional<uint64_t> awake_ns_ago(int rank, uint64_t now_ns) const;
  bool step() { return network_ && network_->step(); }
  void ring_marked();                // tells all that there is news, and sends what was committed
  void ring_urgently(int peer);      // to look around, also if it has nothing to do; of another host: it will anyway
  void ring_own_driver() { host_->ring_driver(host_->rank()); }
  void ring_own_engine() { host_->ring_engine(host_->rank()); }

  // As Bell::sleep; but one thread at a time also wakes when the network has something to do. Any thread.
  template <class Look> void sleep(Bell& bell, uint64_t timeout_ns, Look look) {
    if (!network_ || seat_.exchange(true)) return bell.sleep(timeout_ns, look);
    bell.poll(look, [&] { network_->wait(timeout_ns, host_->event()); });
    host_->clear_event();
    seat_ = false;
  }

 private:
  Peers(int rank, Topology, std::vector<std::string> names, std::unique_ptr<Host>, std::unique_ptr<Network>,
        std::unique_ptr<Heart>);
  int serial(int group) const { return group + Host::kGroups * generation_[size_t(group)]; }

  std::unique_ptr<Host> host_;
  Topology topology_;
  int rank_;
  std::vector<std::string> names_;
  std::unique_ptr<Network> network_;
  std::unique_ptr<Heart> heart_;
  std::vector<int> generation_ = std::vector<int>(Host::kGroups);  // how often a group slot was used before
  std::atomic<bool> seat_{false};    // taken: that thread sleeps on the network
};

}  // namespace lightcc
