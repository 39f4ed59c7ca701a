// Links to ranks of other hosts: a TCP connection for each (peer, group, lane), made when it is first used. The higher
// rank connects; where both have several NICs, control takes the first, and data links take them in turn, by lane and
// ranks, as many as the smaller number of theirs. A connection that breaks is replaced and goes on where it stopped;
// only when the other process is gone, or cannot be reached for half a minute, the peer is lost. One that is stopped is
// not.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "net/address.h"
#include "net/handshake.h"
#include "net/link_table.h"
#include "net/tcp/tcp_stream.h"
#include "net/transport.h"
#include "net/unauthenticated.h"

namespace lightcc {

struct TcpPeer {
  std::string name;            // "rank 1 (pid 17) on host h"
  std::vector<Address> addresses;  // where it listens, one a NIC; none: it is of this host
};

struct TcpTimeouts {
  uint64_t handshake_ns = 5'000'000'000;   // for a connection on which nothing comes
  uint64_t reconnect_ns = 30'000'000'000;  // for a peer to which no connection comes about
};

class TcpTransport : public Transport {
 public:
  static constexpr size_t kDataRing = 1 << 20, kControlRing = 64 << 10;

  // peers: by world rank; those of this host are never asked for. from: where connections start, one a NIC; empty:
  // wherever the system has them start.
  TcpTransport(JobCredentials, int rank, std::vector<TcpPeer> peers, Fd listener, std::vector<Address> from = {},
               TcpTimeouts = {});
  ~TcpTransport() override;

  std::unique_ptr<Link> link(int group, int lane, int peer) override;
  bool step() override;                            // throws also why a peer refuses
  void flush() override;
  uint64_t sent_bytes() const override { return sent_bytes_.load(std::memory_order_relaxed); }
  NetworkFaults faults() override;
  void probe(int peer) override;
  void mark_left(int peer) override { links_.mark_left(peer); }

  int descriptor() const override { return epoll_.get(); }
  uint64_t arm() override;
  bool busy() const override { return timers_ > 0 || blocked_writes_ > 0; }

  bool finish() override;                          // sends fin on every link
  void retire(int group) override;                 // the same, and then they are forgotten
  void end(const Error& cause) override;           // closes every connection; later ones are refused with the cause
  void close() override;                           // the listener as well
  void close_in_child() override;

  // is_heard: whether heartbeats of a peer's host have come since: then a refused connection is no sign of death.
  void set_liveness_check(std::function<bool(int peer, uint64_t since_ns)> is_heard) {
    is_heard_ = std::move(is_heard);
  }
  uint64_t unauthenticated() const { return unauthenticated_.count; }
  uint64_t reconnects() const { return reconnects_; }
  void break_connections();                        // as a fault of the network would; for tests

 private:
  class TcpLink;
  struct TcpLinkState;
  struct Connection;           // an open socket: a link's, or an incoming one that has not said what it wants

  TcpLinkState& link_state(const LinkKey&);
  template <class Stateful> void set_state(Stateful&, typename Stateful::State);
  Connection& open(Fd, Handshake, bool connecting);
  void open_stream(TcpLinkState&);
  void connect(TcpLinkState&, Purpose);
  void on_attempt_failed(TcpLinkState&, int error);  // to connect
  void on_broken(TcpLinkState&, const std::string& why);
  void close(TcpLinkState&);
  void finish(TcpLinkState&);
  void attach(TcpLinkState&, Connection&);
  void mark_dirty(TcpLinkState&);
  void accept_incoming();
  void reject(Connection&);
  void admit(Connection&);
  bool serve(Connection&, uint32_t events);
  void pump_handshake(Connection&);
  void handshake_done(Connection&, std::string_view rest);
  bool read(TcpLinkState&);
  void await(Connection&, size_t bytes);
  void write(TcpLinkState&);
  bool send_handshake(Connection&);
  void poll_for(Connection&, uint32_t events);
  void listen();
  void drop(Connection&);
  static uint64_t retransmits_of(int socket);      // as the kernel has counted them
  void run_timers(uint64_t now);
  [[noreturn]] void throw_lost(const TcpLinkState&, const std::string& why);
  const TcpPeer& peer(const TcpLinkState&) const;
  size_t nic(const TcpLinkState&) const;           // at both ends
  const Address& address(const TcpLinkState& link) const { return peer(link).addresses[nic(link)]; }

  const JobCredentials credentials_;
  const int rank_;
  const std::vector<TcpPeer> peers_;
  Fd listener_;
  const std::vector<Address> from_;
  const TcpTimeouts timeouts_;
  Fd epoll_;
  LinkTable<TcpLinkState> links_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;  // by number; 0 would be the listener's
  uint64_t last_number_ = 0;
  std::vector<TcpLinkState*> dirty_;  // have something to write
  // How many wait for a point in time: connections not yet up, links that have lost theirs, a paused listener.
  std::atomic<int> timers_{0};
  std::atomic<int> blocked_writes_{0};  // connections that took less than was to be sent
  uint64_t timers_ran_ns_ = 0, accept_again_ns_ = 0;
  std::function<bool(int, uint64_t)> is_heard_;
  PendingConnections pending_;  // incoming ones, by number
  UnauthenticatedConnections unauthenticated_;
  bool warned_of_flood_ = false;
  uint64_t reconnects_ = 0;
  uint64_t retransmits_ = 0;    // of connections that are no more
  std::atomic<uint64_t> sent_bytes_{0};
};

}  // namespace lightcc
