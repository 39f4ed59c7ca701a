// Links to ranks of other hosts: a TCP connection for each (peer, group, lane), made when it is first used. The higher
// rank connects. A connection that breaks is replaced and goes on where it stopped; only when the other
// process is gone, or cannot be reached for half a minute, the peer is lost. One that is stopped is not.
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
#include "net/link.h"
#include "net/tcp/tcp_stream.h"
#include "net/unauthenticated.h"

namespace lightcc {

struct Contact {               // how to reach a rank of another host
  std::string name;            // "rank 1 (pid 17) on host h"
  Address address;
};

struct TcpTimeouts {
  uint64_t handshake_ns = 5'000'000'000;   // for a connection on which nothing comes
  uint64_t reconnect_ns = 30'000'000'000;  // for a peer to which no connection comes about
};

// One thread at a time may call; but wait() may be called by another meanwhile.
class TcpTransport {
 public:
  static constexpr int kControl = -1;              // the lane of messages; data lanes count from 0
  static constexpr int kProbe = -2;                // no lane: whether the peer is there at all
  static constexpr size_t kDataRing = 1 << 20, kControlRing = 64 << 10;

  // contacts: by world rank; those of this host are never asked for. from: where connections start, or no address.
  TcpTransport(JobCredentials, int rank, std::vector<Contact> contacts, Fd listener, Address from = {},
               TcpTimeouts = {});
  ~TcpTransport();

  std::unique_ptr<Link> link(int group, int lane, int peer);
  // Whatever can be done without waiting; true if anything moved. Throws Error{peer_lost}, or why a peer refuses.
  bool step();
  void flush();                                    // what was committed since the last
  void wait(uint64_t timeout_ns, int also);        // until step() may have something to do or `also` is readable
  // Has to be stepped though no rank here wants anything.
  bool busy() const { return timers_ > 0 || blocked_writes_ > 0; }
  bool finish();                                   // sends fin on every link; true when all has been delivered
  void retire(int group);                          // its links are gone: the same, and then they are forgotten
  void end(const Error& cause);                    // closes every connection; later ones are refused with the cause
  void close();                                    // the listener as well; only wait() may follow
  // is_heard: whether heartbeats of a peer's host have come since: then a refused connection is no sign of death.
  void set_liveness_check(std::function<bool(int peer, uint64_t since_ns)> is_heard) {
    is_heard_ = std::move(is_heard);
  }
  void probe(int peer);                            // nothing was ever heard of it: is it there? If not, step() throws
  void mark_left(int peer) { left_[size_t(peer)] = 1; }  // it has shut down: that it is not there is no loss
  uint64_t unauthenticated() const { return unauthenticated_.count; }
  uint64_t reconnects() const { return reconnects_; }
  void close_in_child();                           // after fork(): the parent's connections stay the parent's
  void break_connections();                        // as a fault of the network would; for tests

 private:
  struct Key {
    int group, lane, peer;
    auto operator<=>(const Key&) const = default;
  };
  class TcpLink;
  struct TcpLinkState;
  struct Connection;           // an open socket: a link's, or an incoming one that has not said what it wants

  TcpLinkState& link_state(const Key&);
  Connection& open(Fd, Handshake, uint32_t events);
  void open_stream(TcpLinkState&);
  void connect(TcpLinkState&, Purpose);
  void on_attempt_failed(TcpLinkState&, int error);  // to connect
  void on_broken(TcpLinkState&, const std::string& why);
  void close(TcpLinkState&);
  void attach(TcpLinkState&, Connection&);
  void mark_dirty(TcpLinkState&);
  void accept_incoming();
  void reject(Connection&);
  void admit(Connection&);
  bool serve(Connection&, uint32_t events);
  void pump_handshake(Connection&);
  void handshake_done(Connection&, std::string_view rest);
  bool read(TcpLinkState&);
  void write(TcpLinkState&);
  bool send_handshake(Connection&);
  void poll_for(Connection&, uint32_t events);
  void listen();
  void drop(Connection&);
  void run_timers(uint64_t now);
  [[noreturn]] void throw_lost(const TcpLinkState&, const std::string& why);
  const Contact& contact(const TcpLinkState&) const;

  const JobCredentials credentials_;
  const int rank_;
  const std::vector<Contact> contacts_;
  Fd listener_;
  const Address from_;
  const TcpTimeouts timeouts_;
  Fd epoll_;
  std::map<Key, std::unique_ptr<TcpLinkState>> link_states_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;  // by number; 0 would be the listener's
  uint64_t last_number_ = 0;
  std::vector<TcpLinkState*> dirty_;  // have something to write
  // How many wait for a point in time: connections not yet up, links that have lost theirs, a paused listener.
  std::atomic<int> timers_{0};
  std::atomic<int> blocked_writes_{0};  // connections that took less than was to be sent
  uint64_t timers_ran_ns_ = 0, accept_again_ns_ = 0;
  std::vector<char> left_;
  std::function<bool(int, uint64_t)> is_heard_;
  std::unique_ptr<Error> ended_;
  PendingConnections pending_;  // incoming ones, by number
  UnauthenticatedConnections unauthenticated_;
  bool warned_of_flood_ = false;
  uint64_t reconnects_ = 0;
};

}  // namespace lightcc
