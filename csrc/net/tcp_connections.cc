// How connections come about and are replaced: connecting, accepting, the handshake of both, and who is given up.
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "net/tcp_parts.h"

namespace lightcc {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kConnectNs = 2'000 * kMs;    // longest for one attempt
constexpr uint64_t kRetryNs = 100 * kMs;
constexpr uint64_t kRefusedNs = 1'000 * kMs;    // nobody listens at a peer's port for so long: its process has ended
constexpr uint64_t kSilentNs = 800 * kMs;       // nor has its host been heard of: three beats and a bit
constexpr uint64_t kProbeNs = 300 * kMs;        // a lower rank waits so long for the higher one to connect again
constexpr uint64_t kDeafNs = 1'000 * kMs;
constexpr size_t kMostGuests = 256;

void set(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

// A peer whose host vanished without a word is the heartbeats' matter; these find connections that something between
// the hosts has forgotten, so that they are replaced.
void tune(int fd) {
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 20'000);
}

}  // namespace

void Network::watch(Connection& c, uint32_t events) {
  if (c.watched == events) return;
  epoll_event event{events, {}};
  event.data.u64 = c.number;
  if (epoll_ctl(epoll_.get(), c.watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, c.fd.get(), &event) != 0)
    throw system_error("watching a connection");
  stuffed_ += int((events & EPOLLOUT) != 0) - int((c.watched & EPOLLOUT) != 0);
  c.watched = events;
}

Network::Connection& Network::open(Fd fd, Handshake shake, uint32_t events) {
  tune(fd.get());
  auto& c = connections_[++numbers_];
  c = std::make_unique<Connection>(numbers_, std::move(fd), std::move(shake));
  ++restless_;
  watch(*c, events);
  return *c;
}

void Network::drop(Connection& c) {
  if (!c.up && !c.parked) --restless_;
  if (c.watched & EPOLLOUT) --stuffed_;
  if (c.line) c.line->connection = nullptr;
  connections_.erase(c.number);
}

void Network::connect(Line& line, Purpose purpose) {
  const Address& to = contact(line).address;
  line.retry_ns = now_ns() + kRetryNs;
  Fd fd(socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw system_error("opening a connection to " + contact(line).name);
  if (from_.family() == to.family() && bind(fd.get(), from_.with_port(0).get(), from_.length()) != 0)
    return fail(line, errno);
  if (::connect(fd.get(), to.get(), to.length()) != 0 && errno != EINPROGRESS) return fail(line, errno);
  const int lane = std::max(line.key.lane, kControl);
  const Hello hello{purpose, rank_, line.key.peer, line.key.group, lane, line.flow->received()};
  Connection& c = open(std::move(fd), Handshake::connector(terms_, hello), EPOLLOUT);
  c.purpose = purpose, c.line = &line, c.connecting = true;
  line.connection = &c;
}

// An attempt came to nothing. Another follows, unless the peer's process is gone.
void Network::fail(Line& line, int error) {
  const uint64_t now = now_ns();
  if (line.connection) drop(*line.connection);
  if (!std::exchange(line.restless, true)) ++restless_, line.broken_ns = now;
  if (error != ECONNREFUSED) line.refused_ns = 0;
  else if (line.refused_ns == 0) line.refused_ns = now;
  if (excused_[size_t(line.key.peer)]) close(line);
  if (line.closed) return;
  const std::string at = contact(line).address.text();
  const std::string broke = line.how.empty() ? "" : "its connection broke (" + line.how + ") and ";
  // While its host is heard of, something between us refuses: a rank's mates would tell of its death, and one that has
  // none beats itself.
  const bool dead = line.refused_ns && now - line.refused_ns >= kRefusedNs &&
                    !(is_heard_ && is_heard_(line.key.peer, now - kSilentNs));
  if (dead) {
    if (line.was_up) lose(line, "died: " + broke + "nobody listens at " + at + " any more");
    lose(line, "cannot be reached: nobody listens at " + at +
                   "; it died, or that is an address of this host as well, and LIGHTCC_IFACE is needed");
  }
  if (now - line.broken_ns >= patience_.reconnect_ns)
    lose(line, "is out of reach: " + broke + "no connection to " + at + " came about for " +
                   std::to_string(patience_.reconnect_ns / 1'000'000'000) + " s (" + std::strerror(error) +
                   "); does a firewall lie between the hosts, or is LIGHTCC_IFACE needed?");
}

void Network::doubt(int peer) {
  Line& it = line({0, kDoubt, peer});
  if (it.flow || ended_) return;
  it.flow = std::make_unique<Flow>(kControlRing);
  it.broken_ns = now_ns(), it.restless = true, ++restless_;
}

// A connection that was up.
void Network::broke(Line& line, const std::string& how) {
  drop(*line.connection);
  const bool over = line.flow->peer_finished() || (line.finishing && line.flow->delivered());
  if (over || excused_[size_t(line.key.peer)]) return close(line);
  line.how = how, line.broken_ns = now_ns(), line.refused_ns = 0;
  line.retry_ns = line.broken_ns + (line.leads ? 0 : kProbeNs);
  if (!std::exchange(line.restless, true)) ++restless_;
}

// The handshake is over: it carries the line from now on.
void Network::attach(Line& line, Connection& c) {
  if (line.connection && line.connection != &c) drop(*line.connection);
  if (!line.flow) line.flow = std::make_unique<Flow>(line.key.lane == kControl ? kControlRing : kDataRing);
  if (c.shake.state() == Handshake::State::asked) {
    line.flow->restart(c.shake.hello().received);
    c.shake.welcome(line.flow->received());
  } else {
    line.flow->restart(c.shake.peer_received());
  }
  if (!std::exchange(c.parked, false)) --restless_;
  c.line = &line, c.up = true;
  line.connection = &c;
  if (std::exchange(line.restless, false)) --restless_;
  if (std::exchange(line.was_up, true)) ++reconnects_;
  line.refused_ns = 0;
  c.out += c.shake.take_output();
  if (push(c)) mark(line);
}

// ---- guests: whoever connects

void Network::accept_guests() {
  for (int i = 0; i < 64; ++i) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd) {
      if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
      // No descriptor is left: who waits at the door waits a while longer, and we do not turn in circles meanwhile.
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      deaf_until_ns_ = now_ns() + kDeafNs, ++restless_;
      return;
    }
    if (connections_.size() > lines_.size() + kMostGuests) ++strangers_;
    else open(std::move(fd), Handshake::acceptor(terms_, rank_), EPOLLIN);
  }
}

// It has proven that it belongs to the job.
void Network::admit(Connection& c) {
  const Hello& hello = c.shake.hello();
  const bool known = hello.from > rank_ && hello.from < int(contacts_.size()) && contacts_[size_t(hello.from)].address;
  if (ended_) {
    c.shake.refuse(*ended_);
  } else if (hello.purpose == Purpose::probe) {
    c.shake.welcome(0);
  } else if (hello.purpose != Purpose::link || !known || hello.group < 0 || hello.lane < kControl) {
    c.shake.refuse(Error(Code::internal, "rank " + std::to_string(hello.from) + " asks rank " + std::to_string(rank_) +
                                             " for a link that cannot be"));
  } else if (auto it = lines_.find({hello.group, hello.lane, hello.from}); it != lines_.end()) {
    return attach(*it->second, c);
  } else {  // until the group exists here, too
    return void(std::exchange(c.parked, true) || --restless_);
  }
  if (std::exchange(c.parked, false)) ++restless_;
  c.closing = true;
  c.out += c.shake.take_output();
  push(c);
}

void Network::shaken(Connection& c, std::string_view rest) {
  Line& line = *c.line;
  if (c.purpose == Purpose::probe) {  // alive; it will come, or come again
    drop(c);
    if (line.key.lane == kDoubt) return line.closed = true, line.flow.reset();
    line.refused_ns = 0, line.retry_ns = now_ns() + 3 * kProbeNs;
    if (now_ns() - line.broken_ns >= patience_.reconnect_ns) fail(line, ETIMEDOUT);
    return;
  }
  attach(line, c);
  line.flow->feed(rest);
}

void Network::shake(Connection& c) {
  char buffer[4096];
  const ssize_t n = recv(c.fd.get(), buffer, sizeof buffer, 0);
  if (n < 0 && is_for_later(errno)) return;
  if (n <= 0) return c.line ? fail(*c.line, n < 0 ? errno : ECONNRESET) : drop(c);
  if (c.closing) return;
  const std::string_view bytes(buffer, size_t(n));
  const size_t used = c.shake.feed(bytes);
  c.out += c.shake.take_output();
  switch (c.shake.state()) {
    case Handshake::State::going: push(c); return;
    case Handshake::State::asked: return admit(c);
    case Handshake::State::done: return shaken(c, bytes.substr(used));
    case Handshake::State::refused:
      if (!c.line) return c.closing = true, void(push(c));
      if (excused_[size_t(c.line->key.peer)]) return fail(*c.line, ECONNREFUSED);
      throw Error(c.shake.error()->code(), c.shake.error()->what());
    case Handshake::State::stranger:
      ++strangers_;
      if (!c.line) return drop(c);
      return fail(*c.line, EPROTO);
  }
}

// Sends what the handshake has to say. True: all of it is out.
bool Network::push(Connection& c) {
  while (!c.out.empty()) {
    const ssize_t n = send(c.fd.get(), c.out.data(), c.out.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return watch(c, is_for_later(errno) ? kBoth : kIn), false;  // an error shows at the next read
    c.out.erase(0, size_t(n));
  }
  watch(c, kIn);
  if (c.closing) shutdown(c.fd.get(), SHUT_WR);  // the guest reads what we said, then closes
  return true;
}

void Network::look_after(uint64_t now) {
  if (deaf_until_ns_ && now >= deaf_until_ns_) {
    listen();
    deaf_until_ns_ = 0, --restless_;
  }
  std::vector<Connection*> late;
  for (auto& [number, c] : connections_)
    if (const uint64_t most = c->connecting ? kConnectNs : patience_.shake_ns;
        !c->up && !c->parked && now - c->since_ns > most)
      late.push_back(c.get());
  for (Connection* c : late) {
    if (c->line) {
      // Taken by the system and not answered by the process: it is stopped, and that is no loss, however long.
      if (!c->connecting) c->line->broken_ns = now;
      fail(*c->line, ETIMEDOUT);
    } else {
      if (!c->closing) ++strangers_;
      drop(*c);
    }
  }
  for (auto& [key, line] : lines_) {
    if (!line->restless || line->connection) continue;
    const bool wants_link = line->leads && line->key.lane != kDoubt;
    if (line->closed) line->restless = false, --restless_;
    else if (now >= line->retry_ns) connect(*line, wants_link ? Purpose::link : Purpose::probe);
  }
}

}  // namespace lightcc
