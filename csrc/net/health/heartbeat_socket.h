// The heartbeats of one rank (failure_detector.h) on their socket: sends those of its host when it is this rank's turn,
// receives the others', asks hosts that are not heard over TCP, and tells everyone at once when the epoch has ended.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "net/address.h"
#include "net/health/failure_detector.h"
#include "net/health/host_probes.h"
#include "net/shm/local_ranks.h"
#include "net/topology.h"

namespace lightcc {

class HeartbeatSocket {
 public:
  struct Handlers {                               // called by tick()
    std::function<void(int host)> lost;            // it was heard, and then there was no sign of it for 4 s
    std::function<void(int host)> spared;          // no heartbeat of it has come for 4 s, but its ranks answer over TCP
    std::function<void(int host)> unheard;         // it was never heard: UDP does not get through
    std::function<void(Code, const std::string&)> over;  // another rank says that the epoch has ended, and why
  };
  // addresses: by world rank; those of this host are not used. socket: bound, datagrams. local_ranks must outlive it.
  // probes: nullptr: nobody is asked.
  HeartbeatSocket(const JobCredentials&, int rank, const Topology&, std::vector<Address> addresses, Fd socket,
                  LocalRanks& local_ranks, std::unique_ptr<HostProbes> probes = nullptr);

  void set_callbacks(Handlers callbacks) { callbacks_ = std::move(callbacks); }  // before the first tick
  // One thread calls these: tick() every kHeartbeatNs, take_answers() whenever the descriptor is readable (-1: never).
  void tick(uint64_t now_ns);
  void take_answers(uint64_t now_ns);
  int answers_descriptor() const { return probes_ ? probes_->descriptor() : -1; }
  // Tells the end of this host's epoch with every heartbeat from now on, and to everyone now unless `already_known`.
  // ok: all ranks of this host have shut down.
  void announce_end(Code, const std::string& cause, uint64_t now_ns, bool already_known = false);
  // How long ago a rank of another host looked around, if that is known. Any thread.
  std::optional<uint64_t> awake_ns_ago(int rank, uint64_t now_ns) const;
  bool heard_since(int rank, uint64_t then_ns) const;  // its host, and it had not ended. Any thread.
  bool all_heard() const;                          // datagrams of all hosts that send them here get through. Any thread
  void close_in_child() { socket_ = Fd(); }
  uint64_t unauthenticated() const { return unauthenticated_.load(std::memory_order_relaxed); }

 private:
  void receive(uint64_t now_ns, std::vector<Heartbeat>& ends);
  void ask(int host, uint64_t now_ns);
  void send(const std::vector<int>& hosts, uint64_t now_ns);
  void send_to(const Address&, const std::string& bytes);
  Heartbeat next_heartbeat(uint64_t now_ns);

  const HeartbeatKey key_;
  const Topology topology_;
  const int rank_, own_host_;
  const std::vector<Address> addresses_;
  Fd socket_;
  const int family_;
  LocalRanks& local_ranks_;
  const std::unique_ptr<HostProbes> probes_;
  std::vector<size_t> asked_;                      // by host: how often; its ranks take turns
  Handlers callbacks_;
  mutable std::mutex mutex_;
  FailureDetector detector_;                       // under the mutex, as is what follows
  bool over_ = false;
  Code code_ = Code::ok;
  std::string cause_;
  std::atomic<uint64_t> unauthenticated_{0};
};

}  // namespace lightcc
