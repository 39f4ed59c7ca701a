// The heartbeats of one rank (pulse.h) on their socket: sends those of its host when it is this rank's turn, hears the
// others', and tells everyone at once when the epoch has ended.
#pragma once
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "net/address.h"
#include "net/host.h"
#include "net/pulse.h"
#include "net/topology.h"

namespace lightcc {

class Heart {
 public:
  struct News {                                    // called by tick()
    std::function<void(int host)> lost;            // it was heard, and then not for 4 s
    std::function<void(int host)> unheard;         // it was never heard: UDP does not get through
    std::function<void(Code, const std::string&)> over;  // another rank says that the epoch has ended, and why
  };
  // addresses: by world rank; those of this host are not used. socket: bound, datagrams. host must outlive it.
  Heart(const Terms&, int rank, const Topology&, std::vector<Address> addresses, Fd socket, Host& host);

  void listen(News news) { news_ = std::move(news); }  // before the first tick
  void tick(uint64_t now_ns);                      // every kBeatNs
  // With every beat from now on, and to everyone now unless `they_know`; ok: all ranks of this host have left in peace.
  void tell(Code, const std::string& cause, uint64_t now_ns, bool they_know = false);
  // How long ago a rank of another host looked around, if that is known. Any thread.
  std::optional<uint64_t> awake_ns_ago(int rank, uint64_t now_ns) const;
  bool heard_since(int rank, uint64_t then_ns) const;  // its host, and it had not ended. Any thread.
  bool all_heard() const;                          // datagrams have come from all hosts that send them here. Any thread
  void close_in_child() { socket_ = Fd(); }
  uint64_t strangers() const { return strangers_.load(std::memory_order_relaxed); }

 private:
  void send(const std::vector<int>& hosts, uint64_t now_ns);
  void send_to(const Address&, const std::string& bytes);
  Beat beat(uint64_t now_ns) const;

  const BeatKey key_;
  const Topology topology_;
  const int rank_, own_host_;
  const std::vector<Address> addresses_;
  Fd socket_;
  const int family_;
  Host& host_;
  News news_;
  mutable std::mutex mutex_;
  Pulse pulse_;                                    // under the mutex, as is what follows
  bool over_ = false;
  Code code_ = Code::ok;
  std::string cause_;
  std::atomic<uint64_t> strangers_{0};
};

}  // namespace lightcc
