// How connections come about and are replaced: connecting, accepting, the handshake of both, and which peers are given
// up.
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "base/shortage.h"
#include "net/tcp/tcp_state.h"

namespace lightcc {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kConnectNs = 2'000 * kMs;    // longest for one attempt
constexpr uint64_t kRetryNs = 100 * kMs;
constexpr uint64_t kRefusedNs = 1'000 * kMs;    // nobody listens at a peer's port for so long: its process has ended
constexpr uint64_t kHostSilentNs = 800 * kMs;   // nor has a heartbeat of its host come: three periods and a bit
constexpr uint64_t kProbeNs = 300 * kMs;        // a lower rank waits so long for the higher one to connect again
constexpr uint64_t kAcceptPauseNs = 100 * kMs;

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

void TcpTransport::poll_for(Connection& c, uint32_t events) {
  if (c.polled_for == events) return;
  epoll_event event{events, {}};
  event.data.u64 = c.number;
  if (epoll_ctl(epoll_.get(), c.polled_for ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, c.fd(), &event) != 0)
    throw system_error("watching a connection");
  blocked_writes_ += int((events & EPOLLOUT) != 0) - int((c.polled_for & EPOLLOUT) != 0);
  c.polled_for = events;
}

TcpTransport::Connection& TcpTransport::open(Fd fd, Handshake handshake, bool connecting) {
  tune(fd.get());
  const auto first = connecting ? ConnectionState::connecting : ConnectionState::handshaking;
  auto& c = connections_[++last_number_];
  c = std::make_unique<Connection>(last_number_, std::move(fd), std::move(handshake), first);
  timers_ += c->needs_timer();
  poll_for(*c, connecting ? EPOLLOUT : kIn);
  return *c;
}

void TcpTransport::drop(Connection& c) {
  timers_ -= c.needs_timer();
  if (c.polled_for & EPOLLOUT) --blocked_writes_;
  if (c.link) c.link->connection = nullptr;
  pending_.remove(c.number);
  retransmits_ += retransmits_of(c.fd());
  connections_.erase(c.number);
}

uint64_t TcpTransport::retransmits_of(int socket) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  return getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 ? info.tcpi_total_retrans : 0;
}

void TcpTransport::connect(TcpLinkState& link, Purpose purpose) {
  const Address& to = address(link);
  link.retry_ns = now_ns() + kRetryNs;
  Fd fd(socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd) throw system_error("opening a connection to " + peer(link).name);
  const int error = connect_from(fd, to, from_.empty() ? Address() : from_[nic(link)]);
  if (error != 0) return on_attempt_failed(link, error);
  const int lane = std::max(link.key.lane, kControl);
  const Hello hello{purpose, rank_, link.key.peer, link.key.group, lane, link.stream->received()};
  Connection& c = open(std::move(fd), Handshake::connector(credentials_, hello), true);
  c.purpose = purpose;
  c.link = &link;
  link.connection = &c;
}

// An attempt came to nothing. Another follows, unless the peer's process is gone.
void TcpTransport::on_attempt_failed(TcpLinkState& link, int error) {
  const uint64_t now = now_ns();
  if (link.connection) drop(*link.connection);
  if (link.state == LinkState::idle) {
    set_state(link, LinkState::retrying);
    link.broken_ns = now;
  }
  if (error != ECONNREFUSED) link.refused_ns = 0;
  else if (link.refused_ns == 0) link.refused_ns = now;
  if (links_.has_left(link.key.peer)) close(link);
  if (link.state == LinkState::closed) return;
  const std::string at = address(link).text();
  const std::string broke = link.broken_why.empty() ? "" : "its connection broke (" + link.broken_why + ") and ";
  // While heartbeats of its host come, something between us refuses: other ranks of that host would tell of its death,
  // and a rank alone on its host sends them itself.
  const bool dead = link.refused_ns && now - link.refused_ns >= kRefusedNs &&
                    !(is_heard_ && is_heard_(link.key.peer, now - kHostSilentNs));
  if (dead) {
    if (link.state == LinkState::broken) throw_lost(link, "died: " + broke + "nobody listens at " + at + " any more");
    throw_lost(link, "cannot be reached: nobody listens at " + at +
                         "; it died, or that is an address of this host as well, and LIGHTCC_IFACE is needed");
  }
  if (now - link.broken_ns < timeouts_.reconnect_ns) return;
  const bool closed = error == ECONNRESET || error == EPIPE;  // by the process that takes connections there
  const std::string from = from_.empty() ? "" : "from " + from_[nic(link)].text() + " ";
  const char* const remedy = from_.size() > 1
                                 ? "does LIGHTCC_IFACE name the networks in one order on all hosts?"
                                 : "does a firewall lie between the hosts, or is LIGHTCC_IFACE needed?";
  throw_lost(link, "is out of reach: " + broke + "no connection " + from + "to " + at + " came about for " +
                       std::to_string(timeouts_.reconnect_ns / 1'000'000'000) + " s (" + std::strerror(error) + "); " +
                       (closed ? "it was taken and closed each time: is that port flooded (see that rank's log)?"
                               : remedy));
}

void TcpTransport::probe(int peer) {
  TcpLinkState& it = link_state({0, LinkKey::kProbe, peer});
  if (it.stream || links_.ended()) return;
  it.stream = std::make_unique<TcpStream>(kControlRing);
  it.broken_ns = now_ns();
  set_state(it, LinkState::probing);
}

// A connection that was up.
void TcpTransport::on_broken(TcpLinkState& link, const std::string& why) {
  drop(*link.connection);
  const bool over = link.stream->peer_finished() || (link.end != LinkEnd::open && link.stream->delivered());
  if (over || links_.has_left(link.key.peer)) return close(link);
  link.broken_why = why;
  link.broken_ns = now_ns();
  link.refused_ns = 0;
  link.retry_ns = link.broken_ns + (link.connects ? 0 : kProbeNs);
  set_state(link, LinkState::broken);
}

// The handshake is over: the connection carries the link from now on.
void TcpTransport::attach(TcpLinkState& link, Connection& c) {
  if (link.connection && link.connection != &c) drop(*link.connection);
  if (!link.stream) link.stream = std::make_unique<TcpStream>(link.key.lane == kControl ? kControlRing : kDataRing);
  if (link.end == LinkEnd::retired) link.stream->finish();
  if (c.handshake().state() == Handshake::State::asked) {
    link.stream->restart(c.handshake().hello().received);
    c.handshake().welcome(link.stream->received());
  } else {
    link.stream->restart(c.handshake().peer_received());
  }
  pending_.remove(c.number);
  c.link = &link;
  link.connection = &c;
  reconnects_ += link.state == LinkState::up || link.state == LinkState::broken;
  set_state(c, ConnectionState::up);
  set_state(link, LinkState::up);
  link.refused_ns = 0;
  if (send_handshake(c)) mark_dirty(link);
}

// ---- incoming connections

void TcpTransport::accept_incoming() {
  for (int i = 0; i < 64; ++i) {
    sockaddr_storage from{};
    socklen_t length = sizeof from;
    auto* seen = reinterpret_cast<sockaddr*>(&from);
    Fd fd(accept4(listener_.get(), seen, &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd && is_shortage(errno)) {
      if (const auto overdue = pending_.overdue(now_ns())) {
        reject(*connections_.at(*overdue));
        continue;
      }
      // New connections wait in the listener's queue a while longer, and step() does not spin meanwhile.
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      accept_again_ns_ = now_ns() + kAcceptPauseNs;
      ++timers_;
      return;
    }
    if (!fd) return;
    if (const auto surplus = pending_.surplus()) {
      reject(*connections_.at(*surplus));
      if (!std::exchange(warned_of_flood_, true))
        log(Level::warning, "this rank's port is flooded: more than " + std::to_string(pending_.most()) +
                                " connections have not proven to be of this job, the oldest are closed." +
                                unauthenticated_.text());
    }
    Connection& c = open(std::move(fd), Handshake::acceptor(credentials_, rank_), false);
    c.seen = Address(seen, length);
    pending_.add(c.number, c.since_ns);
  }
}

void TcpTransport::reject(Connection& c) {
  unauthenticated_.add(c.seen.text());
  drop(c);
}

// The other end has proven that it belongs to the job.
void TcpTransport::admit(Connection& c) {
  const Hello& hello = c.handshake().hello();
  const bool is_rank = hello.from > rank_ && hello.from < int(peers_.size());
  const bool known = is_rank && !peers_[size_t(hello.from)].addresses.empty();
  if (const auto& cause = links_.ended()) {
    c.handshake().refuse(*cause);
  } else if (hello.purpose == Purpose::probe) {
    c.handshake().welcome(0);
  } else if (hello.purpose != Purpose::link || !known || hello.group < 0 || hello.lane < kControl) {
    c.handshake().refuse(Error(Code::internal, "rank " + std::to_string(hello.from) + " asks rank " +
                                                   std::to_string(rank_) + " for a link that cannot be"));
  } else {
    const LinkKey key{hello.group, hello.lane, hello.from};
    TcpLinkState* link = links_.find(key);
    if (!link && links_.is_retired(key.group)) link = &link_state(key);  // it has ended here before anyone used it
    if (!link) {  // until the group exists here, too
      pending_.remove(c.number);
      return set_state(c, ConnectionState::awaits_group);
    }
    if (link->end != LinkEnd::retired || link->state != LinkState::closed) return attach(*link, c);
    c.handshake().refuse(Error(Code::shut_down, "rank " + std::to_string(rank_) + " has closed this link"));
  }
  set_state(c, ConnectionState::closing);
  send_handshake(c);
}

void TcpTransport::handshake_done(Connection& c, std::string_view rest) {
  TcpLinkState& link = *c.link;
  if (c.purpose == Purpose::probe) {  // alive; it will come, or come again
    drop(c);
    if (link.key.lane == LinkKey::kProbe) {
      set_state(link, LinkState::closed);
      return link.stream.reset();
    }
    link.refused_ns = 0;
    link.retry_ns = now_ns() + 3 * kProbeNs;
    if (now_ns() - link.broken_ns >= timeouts_.reconnect_ns) on_attempt_failed(link, ETIMEDOUT);
    return;
  }
  attach(link, c);
  link.stream->feed(rest);
}

void TcpTransport::pump_handshake(Connection& c) {
  const auto received = c.receive();
  if (!received) return;
  if (received->error) return c.link ? on_attempt_failed(*c.link, received->error) : drop(c);
  if (c.state == ConnectionState::closing) return;
  switch (c.handshake().state()) {
    case Handshake::State::going: send_handshake(c); return;
    case Handshake::State::asked: return admit(c);
    case Handshake::State::done: return handshake_done(c, received->rest);
    case Handshake::State::refused:
      if (!c.link) {
        set_state(c, ConnectionState::closing);
        send_handshake(c);
        return;
      }
      if (TcpLinkState& link = *c.link; link.end == LinkEnd::retired) return drop(c), close(link);
      if (links_.has_left(c.link->key.peer)) return on_attempt_failed(*c.link, ECONNREFUSED);
      throw Error(c.handshake().error()->code(), c.handshake().error()->what());
    case Handshake::State::unauthenticated:
      if (!c.link) return reject(c);
      unauthenticated_.add(address(*c.link).text());
      return on_attempt_failed(*c.link, EPROTO);
  }
}

// Sends what the handshake has to say. True: all of it is out.
bool TcpTransport::send_handshake(Connection& c) {
  const auto sent = c.send();
  poll_for(c, sent == HandshakeConnection::Sent::later ? kBoth : kIn);  // an error shows at the next read
  if (sent != HandshakeConnection::Sent::all) return false;
  if (c.state == ConnectionState::closing) shutdown(c.fd(), SHUT_WR);  // the other end reads what we said, then closes
  return true;
}

void TcpTransport::run_timers(uint64_t now) {
  if (accept_again_ns_ && now >= accept_again_ns_) {
    listen();
    accept_again_ns_ = 0;
    --timers_;
  }
  std::vector<Connection*> late;
  for (auto& [number, c] : connections_)
    if (const bool connecting = c->state == ConnectionState::connecting;
        c->needs_timer() && now - c->since_ns > (connecting ? kConnectNs : timeouts_.handshake_ns))
      late.push_back(c.get());
  for (Connection* c : late) {
    if (c->link) {
      // Taken by the system and not answered by the process: it is stopped, and that is no loss, however long.
      if (c->state != ConnectionState::connecting) c->link->broken_ns = now;
      on_attempt_failed(*c->link, ETIMEDOUT);
    } else {
      if (c->state == ConnectionState::closing) drop(*c);
      else reject(*c);
    }
  }
  for (auto& [key, link] : links_) {
    if (!link->needs_timer() || link->connection || now < link->retry_ns) continue;
    const bool wants_link = link->connects && link->state != LinkState::probing;
    connect(*link, wants_link ? Purpose::link : Purpose::probe);
  }
}

}  // namespace lightcc
