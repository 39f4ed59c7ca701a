// The links, and the bytes that go over connections that are up. How those come about: tcp_connections.cc.
#include "net/tcp/tcp_transport.h"

#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "net/tcp/tcp_state.h"

namespace lightcc {
namespace {

constexpr uint64_t kTimerNs = 20'000'000;
// At once; in one step, of one link. Little, so that memory for the next records can be posted before they are read.
constexpr size_t kBufferBytes = 16 << 10, kReadBytes = 256 << 10;
constexpr size_t kLeastAwaited = 16 << 10, kMostAwaited = 128 << 10;  // at once

// Before Linux 5.12, whoever waits for much may sleep on although the receive buffer is full with less.
bool kernel_wakes_for_full_buffers() {
  utsname system;
  int major = 0, minor = 0;
  return uname(&system) == 0 && std::sscanf(system.release, "%d.%d", &major, &minor) == 2 &&
         std::pair(major, minor) >= std::pair(5, 12);
}

}  // namespace

class TcpTransport::TcpLink : public Link, public BulkLink {
 public:
  TcpLink(TcpTransport& transport, TcpLinkState& link) : transport_(transport), state_(link) {}
  std::byte* reserve(size_t n) override { return transport_.open_stream(state_), state_.stream->reserve(n); }
  void commit(size_t n) override { state_.stream->commit(n), transport_.mark_dirty(state_); }
  const std::byte* peek(size_t n) override {
    // Only the rank that connects must act before the peer does; so a coordinator holds no rings for members that are
    // silent.
    if (state_.connects) transport_.open_stream(state_);
    return state_.stream ? state_.stream->peek(n) : nullptr;
  }
  void consume(size_t n) override { state_.stream->consume(n), transport_.mark_dirty(state_); }
  size_t record_bytes() const override { return (state_.key.lane == kControl ? kControlRing : kDataRing) / 4; }

  BulkLink* bulk() override { return this; }
  bool send_from(const std::byte* data, size_t n) override {
    transport_.open_stream(state_);
    if (!state_.stream->send_from(data, n)) return false;
    transport_.mark_dirty(state_);
    return true;
  }
  void post(std::byte* to, size_t n) override { transport_.open_stream(state_), state_.stream->post(to, n); }
  uint64_t lent() const override { return state_.stream ? state_.stream->lent() : 0; }
  size_t release_lent(uint64_t before) override { return state_.stream ? state_.stream->release_lent(before) : 0; }
  size_t release() override { return state_.stream ? state_.stream->release() : 0; }

 private:
  TcpTransport& transport_;
  TcpLinkState& state_;
};

TcpTransport::TcpTransport(JobCredentials credentials, int rank, std::vector<TcpPeer> peers, Fd listener,
                           std::vector<Address> from, TcpTimeouts timeouts)
    : credentials_(std::move(credentials)),
      rank_(rank),
      peers_(std::move(peers)),
      listener_(std::move(listener)),
      from_(std::move(from)),
      timeouts_(timeouts),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      links_(rank),
      pending_(peers_.size()) {
  if (!epoll_) throw system_error("watching the network");
  listen();
}

TcpTransport::~TcpTransport() = default;

void TcpTransport::listen() {
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = 0;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) throw system_error("watching the network");
}

const TcpPeer& TcpTransport::peer(const TcpLinkState& link) const { return peers_[size_t(link.key.peer)]; }

size_t TcpTransport::nic(const TcpLinkState& link) const {
  const size_t both = std::min(std::max<size_t>(from_.size(), 1), peer(link).addresses.size());
  // The rank and the peer count as well, so that the links of groups with one lane are spread, too.
  return link.key.lane < 0 ? 0 : size_t(link.key.lane + rank_ + link.key.peer) % both;
}

void TcpTransport::throw_lost(const TcpLinkState& link, const std::string& why) {
  throw Error(Code::peer_lost,
              peer(link).name + " " + why + (unauthenticated_.count ? "." + unauthenticated_.text() : ""));
}

// ---- links

TcpTransport::TcpLinkState& TcpTransport::link_state(const LinkKey& key) {
  return links_.get(key, [&] {
    auto made = std::make_unique<TcpLinkState>(key, links_.connects(key.peer));
    if (links_.is_retired(key.group)) made->end = LinkEnd::retired;
    return made;
  });
}

std::unique_ptr<Link> TcpTransport::link(int group, int lane, int peer) {
  TcpLinkState& it = link_state({group, lane, peer});
  for (auto& [number, incoming] : connections_) {  // it may have come before us
    const Hello& hello = incoming->handshake().hello();
    if (incoming->state != ConnectionState::awaits_group) continue;
    if (LinkKey{hello.group, hello.lane, hello.from} != it.key) continue;
    attach(it, *incoming);
    break;
  }
  return std::make_unique<TcpLink>(*this, it);
}

void TcpTransport::open_stream(TcpLinkState& link) {
  if (link.stream) return;
  link.stream = std::make_unique<TcpStream>(link.key.lane == kControl ? kControlRing : kDataRing);
  if (link.connects && !links_.ended()) connect(link, Purpose::link);
}

void TcpTransport::mark_dirty(TcpLinkState& link) {
  if (!std::exchange(link.dirty, true)) dirty_.push_back(&link);
}

void TcpTransport::flush() {
  for (TcpLinkState* link : std::exchange(dirty_, {})) {
    link->dirty = false;
    write(*link);
  }
}

void TcpTransport::finish(TcpLinkState& link) {
  link.stream->finish();
  mark_dirty(link);
}

bool TcpTransport::finish() {
  bool delivered = true;
  for (auto& [key, link] : links_) {
    if (!link->stream || link->state == LinkState::closed) continue;
    if (link->end == LinkEnd::open) {
      link->end = LinkEnd::finishing;
      finish(*link);
    }
    // One that only waited to be connected to has nothing to deliver.
    const bool idle = link->state == LinkState::idle && !link->connects && !link->stream->has_committed();
    delivered = delivered && (idle || link->stream->delivered() || links_.has_left(key.peer));
  }
  flush();
  return delivered;
}

void TcpTransport::retire(int group) {
  links_.retire(group);
  const auto links = links_.of_group(group);
  for (auto it = links.begin(); it != links.end();) {
    TcpLinkState& link = *it->second;
    // The peer may have used it alone, or not at all: if it did, its connection is on its way, and admitted.
    const bool is_unused = !link.stream || (!link.connects && link.state == LinkState::idle);
    if (is_unused && link.state != LinkState::closed) {
      std::erase(dirty_, &link);
      it = links_.erase(it);
      continue;
    }
    link.end = LinkEnd::retired;
    if (link.state == LinkState::closed) link.stream.reset();
    else finish(link);
    ++it;
  }
  std::vector<Connection*> waiting;
  for (auto& [number, connection] : connections_)
    if (connection->state == ConnectionState::awaits_group && connection->handshake().hello().group == group)
      waiting.push_back(connection.get());
  for (Connection* connection : waiting) admit(*connection);
}

void TcpTransport::end(const Error& cause) {
  links_.end_epoch(cause);
  for (auto it = connections_.begin(); it != connections_.end();) {
    Connection& connection = *(it++)->second;
    if (connection.link) drop(connection);
    else if (connection.state == ConnectionState::awaits_group) admit(connection);
  }
  for (auto& [key, link] : links_) set_state(*link, LinkState::closed);
}

void TcpTransport::close() {
  end(Error(Code::shut_down, "this rank has shut down"));
  connections_.clear();
  listener_ = Fd();
  timers_ = blocked_writes_ = 0;
}

void TcpTransport::close_in_child() {
  connections_.clear();
  listener_ = Fd();
  epoll_ = Fd();
}

void TcpTransport::break_connections() {
  for (auto& [number, connection] : connections_)
    if (connection->state == ConnectionState::up) shutdown(connection->fd(), SHUT_RDWR);
}

// ---- bytes

void TcpTransport::write(TcpLinkState& link) {
  Connection* c = link.connection;
  if (!c || c->state != ConnectionState::up || !c->all_sent()) return;
  std::array<iovec, TcpStream::kPieces> pieces;
  while (const size_t count = link.stream->to_send(pieces)) {
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = count;
    const ssize_t n = sendmsg(c->fd(), &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return poll_for(*c, is_for_later(errno) ? kBoth : kIn);
    link.stream->sent(size_t(n));
    sent_bytes_.fetch_add(uint64_t(n), std::memory_order_relaxed);
  }
  poll_for(*c, kIn);
  if (link.end == LinkEnd::retired && link.stream->delivered() && link.stream->peer_finished()) {
    drop(*c);
    close(link);
  }
}

NetworkFaults TcpTransport::faults() {
  NetworkFaults faults{retransmits_, reconnects_};
  for (const auto& [number, connection] : connections_) faults.retransmits += retransmits_of(connection->fd());
  return faults;
}

void TcpTransport::close(TcpLinkState& link) {
  set_state(link, LinkState::closed);
  if (link.end == LinkEnd::retired) link.stream.reset();  // its link is gone
}

// So many bytes will come: whoever sleeps is woken for all of them, or for much, and not for each segment.
void TcpTransport::await(Connection& c, size_t bytes) {
  static const bool is_safe = kernel_wakes_for_full_buffers();
  const int low_water = bytes < kLeastAwaited ? 1 : int(std::min(bytes, kMostAwaited));
  if (!is_safe || c.low_water == low_water) return;
  c.low_water = low_water;
  setsockopt(c.fd(), SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water);
}

// What has come; straight to where it belongs where it is much.
bool TcpTransport::read(TcpLinkState& link) {
  char buffer[kBufferBytes];
  std::array<iovec, TcpStream::kPieces + 1> pieces;
  bool moved = false;
  for (size_t bytes = 0; bytes < kReadBytes;) {
    const size_t count = link.stream->to_receive(std::span(pieces).first<TcpStream::kPieces>());
    pieces[count] = {buffer, sizeof buffer};
    size_t direct = 0;
    for (size_t i = 0; i < count; ++i) direct += pieces[i].iov_len;
    const ssize_t n = readv(link.connection->fd(), pieces.data(), int(count) + 1);
    if (n < 0 && is_for_later(errno)) break;
    if (n <= 0) return on_broken(link, n < 0 ? std::strerror(errno) : "closed by the other side"), true;
    const size_t whole = direct + sizeof buffer;
    direct = std::min(size_t(n), direct);
    try {
      link.stream->arrived(direct);
      link.stream->feed({buffer, size_t(n) - direct});
    } catch (const Error& error) {
      throw Error(error.code(), peer(link).name + ": " + error.what());
    }
    mark_dirty(link);  // there may be something to acknowledge
    moved = true;
    bytes += size_t(n);
    if (size_t(n) < whole) break;
  }
  await(*link.connection, link.stream->expected());
  return moved;
}

bool TcpTransport::serve(Connection& c, uint32_t events) {
  if (c.state == ConnectionState::connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(c.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error) return on_attempt_failed(*c.link, error), true;
    set_state(c, ConnectionState::handshaking);
    c.since_ns = now_ns();
    return send_handshake(c), true;
  }
  if (events & EPOLLOUT && !c.all_sent() && !send_handshake(c)) return true;
  if (c.state != ConnectionState::up) return pump_handshake(c), true;
  TcpLinkState& link = *c.link;
  if (events & EPOLLOUT) write(link);
  return link.connection && events & ~uint32_t(EPOLLOUT) ? read(link) : true;
}

bool TcpTransport::step() {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), int(events.size()), 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t number = events[size_t(i)].data.u64;
    if (number == 0) {
      accept_incoming();
      moved = true;
    } else if (auto it = connections_.find(number); it != connections_.end()) {
      moved |= serve(*it->second, events[size_t(i)].events);
    }
  }
  if (timers_ > 0)
    if (const uint64_t now = now_ns(); now - timers_ran_ns_ >= kTimerNs) run_timers(timers_ran_ns_ = now);
  return moved;
}

uint64_t TcpTransport::arm() { return timers_ > 0 ? kTimerNs : kForever; }

}  // namespace lightcc
