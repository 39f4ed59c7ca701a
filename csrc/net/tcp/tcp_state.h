// The states of a TcpTransport's links and connections, for its own files. Invariants:
// 1. A link that is up has a connection that is up, and that connection's link is it. In every other state its
//    connection, if it has one, is an attempt to bring it up.
// 2. timers_ counts the links and connections that wait for a point in time (needs_timer): set_state() keeps it.
// 3. A connection is a link's or it is incoming; one that awaits its group is both proven and nobody's.
#pragma once
#include <sys/epoll.h>

#include <cerrno>

#include "base/clock.h"
#include "net/handshake_connection.h"
#include "net/tcp/tcp_transport.h"

namespace lightcc {

inline constexpr uint32_t kIn = EPOLLIN, kBoth = EPOLLIN | EPOLLOUT;
inline bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

enum class LinkState {
  idle,      // no connection has carried it yet: none was needed, the first is being made, or the peer makes it
  retrying,  // no connection has carried it, and an attempt has failed
  up,        // a connection carries it
  broken,    // that is gone, and another is to take its place
  probing,   // no link at all: is the peer there?
  closed     // nothing more is expected of it
};
enum class LinkEnd { open, finishing, retired };  // nothing more is committed; and the Link is gone as well

struct TcpTransport::TcpLinkState {
  using State = LinkState;
  TcpLinkState(const LinkKey& k, bool connects_) : key(k), connects(connects_) {}
  bool needs_timer() const { return state == State::retrying || state == State::broken || state == State::probing; }

  const LinkKey key;
  const bool connects;           // this rank connects
  State state = State::idle;
  LinkEnd end = LinkEnd::open;
  std::unique_ptr<TcpStream> stream;  // once the link is used
  Connection* connection = nullptr;
  bool dirty = false;            // in dirty_
  uint64_t broken_ns = 0, retry_ns = 0, refused_ns = 0;  // since when; next attempt; since when nobody listens
  std::string broken_why;        // the last connection
};

enum class ConnectionState {
  connecting,
  handshaking,
  awaits_group,  // incoming and proven; this rank has no such link yet
  closing,       // the handshake has ended and said its last, which the other end shall read and then close
  up             // carries its link
};

struct TcpTransport::Connection : HandshakeConnection {
  using State = ConnectionState;
  Connection(uint64_t n, Fd fd, Handshake handshake, State first)
      : HandshakeConnection(std::move(fd), std::move(handshake)), number(n), state(first) {}
  bool needs_timer() const { return state != State::awaits_group && state != State::up; }

  const uint64_t number;
  State state;
  Address seen;                  // of an incoming one
  Purpose purpose = Purpose::link;
  TcpLinkState* link = nullptr;
  uint64_t since_ns = now_ns();
  uint32_t polled_for = 0;
  int low_water = 1;             // of its receive buffer, in bytes
};

// In one step, so that whoever is about to sleep sees no timer missing.
template <class Stateful> void TcpTransport::set_state(Stateful& it, typename Stateful::State to) {
  const int before = it.needs_timer();
  it.state = to;
  timers_ += it.needs_timer() - before;
}

}  // namespace lightcc
