// What a Network is made of, for its own files.
#pragma once
#include <sys/epoll.h>

#include <cerrno>

#include "base/clock.h"
#include "net/tcp.h"

namespace lightcc {

inline constexpr uint32_t kIn = EPOLLIN, kBoth = EPOLLIN | EPOLLOUT;
inline bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

struct Network::Line {
  Line(const Key& k, int rank) : key(k), leads(rank > k.peer) {}
  const Key key;
  const bool leads;              // this rank connects
  std::unique_ptr<Flow> flow;    // once it is used
  Connection* connection = nullptr;
  bool dirty = false, finishing = false, retired = false, closed = false, restless = false;
  bool was_up = false;
  uint64_t broken_ns = 0, retry_ns = 0, refused_ns = 0;  // since when; next attempt; since when nobody listens
  std::string how;               // it broke
};

struct Network::Connection {
  Connection(uint64_t n, Fd f, Handshake h) : number(n), fd(std::move(f)), shake(std::move(h)) {}
  const uint64_t number;
  const Fd fd;
  Handshake shake;
  Purpose purpose = Purpose::link;
  Line* line = nullptr;
  bool connecting = false, up = false, parked = false, closing = false;
  uint64_t since_ns = now_ns();
  uint32_t watched = 0;
  std::string out;               // of the handshake
};

}  // namespace lightcc
