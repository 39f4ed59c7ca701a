// The state of a TcpTransport's links and connections, for its own files.
#pragma once
#include <sys/epoll.h>

#include <cerrno>

#include "base/clock.h"
#include "net/tcp/tcp_transport.h"

namespace lightcc {

inline constexpr uint32_t kIn = EPOLLIN, kBoth = EPOLLIN | EPOLLOUT;
inline bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

struct TcpTransport::TcpLinkState {
  TcpLinkState(const Key& k, int rank) : key(k), connects(rank > k.peer) {}
  const Key key;
  const bool connects;           // this rank connects
  std::unique_ptr<TcpStream> stream;  // once the link is used
  Connection* connection = nullptr;
  bool dirty = false, finishing = false, retired = false, closed = false, has_timer = false;
  bool was_up = false;
  uint64_t broken_ns = 0, retry_ns = 0, refused_ns = 0;  // since when; next attempt; since when nobody listens
  std::string broken_why;        // the last connection
};

struct TcpTransport::Connection {
  Connection(uint64_t n, Fd f, Handshake h) : number(n), fd(std::move(f)), handshake(std::move(h)) {}
  const uint64_t number;
  const Fd fd;
  Handshake handshake;
  Address seen;                  // of an incoming one
  Purpose purpose = Purpose::link;
  TcpLinkState* link = nullptr;
  bool connecting = false, up = false, awaits_group = false, closing = false;
  uint64_t since_ns = now_ns();
  uint32_t polled_for = 0;
  std::string out;               // of the handshake
};

}  // namespace lightcc
