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
#include "net/flow.h"
#include "net/handshake.h"
#include "net/link.h"

namespace lightcc {

struct Contact {               // how to reach a rank of another host
  std::string name;            // "rank 1 (pid 17) on host h"
  Address address;
};

struct TcpPatience {
  uint64_t shake_ns = 5'000'000'000;       // with who has connected and says nothing
  uint64_t reconnect_ns = 30'000'000'000;  // with a peer to which no connection comes about
};

// One thread at a time may call; but wait() may be called by another meanwhile.
class Network {
 public:
  static constexpr int kControl = -1;              // the lane of messages; data lanes count from 0
  static constexpr int kDoubt = -2;                // no lane: whether the peer is there at all
  static constexpr size_t kDataRing = 1 << 20, kControlRing = 64 << 10;

  // contacts: by world rank; those of this host are never asked for. from: where connections start, or no address.
  Network(Terms, int rank, std::vector<Contact> contacts, Fd listener, Address from = {}, TcpPatience = {});
  ~Network();

  std::unique_ptr<Link> link(int group, int lane, int peer);
  // Whatever can be done without waiting; true if anything moved. Throws Error{peer_lost}, or why a peer refuses.
  bool step();
  void flush();                                    // what was committed since the last
  void wait(uint64_t timeout_ns, int also);        // until step() may have something to do or `also` is readable
  bool busy() const { return restless_ > 0 || stuffed_ > 0; }  // has to be stepped though no rank here wants anything
  bool finish();                                   // says goodbye on every link; true when all has been delivered
  void retire(int group);                          // its links are gone: the same, and then they are forgotten
  void end(const Error& cause);                    // closes every connection; who still comes hears the cause
  void close();                                    // the door as well; only wait() may follow
  // Whether the host of a peer has been heard of since, by other ways: then a refused connection is no sign of death.
  void listen_to(std::function<bool(int peer, uint64_t since_ns)> is_heard) { is_heard_ = std::move(is_heard); }
  void doubt(int peer);                            // nothing was ever heard of it: is it there? If not, step() throws
  void excuse(int peer) { excused_[size_t(peer)] = 1; }  // it has left in peace: that it is not there is no loss
  uint64_t strangers() const { return strangers_; }
  uint64_t reconnects() const { return reconnects_; }
  void close_in_child();                           // after fork(): the parent's connections stay the parent's
  void break_connections();                        // as a fault of the network would; for tests

 private:
  struct Key {
    int group, lane, peer;
    auto operator<=>(const Key&) const = default;
  };
  class TcpLink;
  struct Line;                 // a link's state
  struct Connection;           // an open socket: a line's, or a guest's that has not said what it wants

  Line& line(const Key&);
  Connection& open(Fd, Handshake, uint32_t events);
  void use(Line&);
  void connect(Line&, Purpose);
  void fail(Line&, int error);                     // the attempt to connect
  void broke(Line&, const std::string& how);
  void close(Line&);
  void attach(Line&, Connection&);
  void mark(Line&);
  void accept_guests();
  void admit(Connection&);
  bool serve(Connection&, uint32_t events);
  void shake(Connection&);
  void shaken(Connection&, std::string_view rest);
  bool read(Line&);
  void write(Line&);
  bool push(Connection&);
  void watch(Connection&, uint32_t events);
  void listen();
  void drop(Connection&);
  void look_after(uint64_t now);
  [[noreturn]] void lose(const Line&, const std::string& why);
  const Contact& contact(const Line&) const;

  const Terms terms_;
  const int rank_;
  const std::vector<Contact> contacts_;
  Fd listener_;
  const Address from_;
  const TcpPatience patience_;
  Fd epoll_;
  std::map<Key, std::unique_ptr<Line>> lines_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;  // by number; 0 would be the listener's
  uint64_t numbers_ = 0;
  std::vector<Line*> dirty_;   // have something to write
  // Connections not yet up, and lines that have lost theirs: they need a look at the clock.
  std::atomic<int> restless_{0};
  std::atomic<int> stuffed_{0};  // connections that took less than was to be sent
  uint64_t looked_ns_ = 0, deaf_until_ns_ = 0;
  std::vector<char> excused_;
  std::function<bool(int, uint64_t)> is_heard_;
  std::unique_ptr<Error> ended_;
  uint64_t strangers_ = 0, reconnects_ = 0;
};

}  // namespace lightcc
