// The network's links, and the bytes that go over connections that are up. How they come about: tcp_connections.cc.
#include "net/tcp.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "net/tcp_parts.h"

namespace lightcc {
namespace {

constexpr uint64_t kLookNs = 20'000'000;
constexpr size_t kBufferBytes = 16 << 10, kReadBytes = 1 << 20;  // at once; in one step, of one line

}  // namespace

class Network::TcpLink : public Link {
 public:
  TcpLink(Network& network, Line& line) : network_(network), line_(line) {}
  std::byte* reserve(size_t n) override { return network_.use(line_), line_.flow->reserve(n); }
  void commit(size_t n) override { line_.flow->commit(n), network_.mark(line_); }
  const std::byte* peek(size_t n) override {
    // Only who leads must act before the peer does; so a coordinator holds no rings for members that are silent.
    if (line_.leads) network_.use(line_);
    return line_.flow ? line_.flow->peek(n) : nullptr;
  }
  void consume(size_t n) override { line_.flow->consume(n), network_.mark(line_); }
  size_t record_bytes() const override { return (line_.key.lane == kControl ? kControlRing : kDataRing) / 4; }

 private:
  Network& network_;
  Line& line_;
};

Network::Network(Terms terms, int rank, std::vector<Contact> contacts, Fd listener, Address from, TcpPatience patience)
    : terms_(std::move(terms)), rank_(rank), contacts_(std::move(contacts)), listener_(std::move(listener)),
      from_(from), patience_(patience), epoll_(epoll_create1(EPOLL_CLOEXEC)), excused_(contacts_.size()) {
  if (!epoll_) throw system_error("watching the network");
  listen();
}

Network::~Network() = default;

void Network::listen() {
  epoll_event event{EPOLLIN, {}};
  event.data.u64 = 0;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0) throw system_error("watching the network");
}

const Contact& Network::contact(const Line& line) const { return contacts_[size_t(line.key.peer)]; }

void Network::lose(const Line& line, const std::string& why) {
  throw Error(Code::peer_lost, contact(line).name + " " + why);
}

// ---- links

Network::Line& Network::line(const Key& key) {
  auto& line = lines_[key];
  if (!line) line = std::make_unique<Line>(key, rank_);
  return *line;
}

std::unique_ptr<Link> Network::link(int group, int lane, int peer) {
  Line& it = line({group, lane, peer});
  for (auto& [number, guest] : connections_) {  // it may have come before us
    const Hello& hello = guest->shake.hello();
    if (!guest->parked || Key{hello.group, hello.lane, hello.from} != it.key) continue;
    attach(it, *guest);
    break;
  }
  return std::make_unique<TcpLink>(*this, it);
}

void Network::use(Line& line) {
  if (line.flow) return;
  line.flow = std::make_unique<Flow>(line.key.lane == kControl ? kControlRing : kDataRing);
  if (line.leads && !ended_) connect(line, Purpose::link);
}

void Network::mark(Line& line) {
  if (!std::exchange(line.dirty, true)) dirty_.push_back(&line);
}

void Network::flush() {
  for (Line* line : std::exchange(dirty_, {})) {
    line->dirty = false;
    write(*line);
  }
}

bool Network::finish() {
  bool delivered = true;
  for (auto& [key, line] : lines_) {
    if (!line->flow || line->closed) continue;
    if (!std::exchange(line->finishing, true)) line->flow->finish(), mark(*line);
    delivered = delivered && (line->flow->delivered() || excused_[size_t(key.peer)]);
  }
  flush();
  return delivered;
}

void Network::retire(int group) {
  for (auto it = lines_.lower_bound({group, kControl, 0}); it != lines_.end() && it->first.group == group; ++it) {
    Line& line = *it->second;
    if (!line.flow || line.closed) continue;
    line.retired = line.finishing = true;
    line.flow->finish();
    mark(line);
  }
}

void Network::end(const Error& cause) {
  if (!ended_) ended_ = std::make_unique<Error>(cause);
  for (auto it = connections_.begin(); it != connections_.end();) {
    Connection& connection = *(it++)->second;
    if (connection.line) drop(connection);
    else if (connection.parked) admit(connection);
  }
  for (auto& [key, line] : lines_) line->closed = true;
}

void Network::close() {
  end(Error(Code::shut_down, "this rank has shut down"));
  connections_.clear();
  listener_ = Fd();
  restless_ = stuffed_ = 0;
}

void Network::close_in_child() {
  connections_.clear();
  listener_ = Fd();
  epoll_ = Fd();
}

void Network::break_connections() {
  for (auto& [number, connection] : connections_)
    if (connection->up) shutdown(connection->fd.get(), SHUT_RDWR);
}

// ---- bytes

void Network::write(Line& line) {
  Connection* c = line.connection;
  if (!c || !c->up || !c->out.empty()) return;
  std::array<iovec, 2> pieces;
  while (const int count = line.flow->to_send(pieces)) {
    msghdr message{};
    message.msg_iov = pieces.data(), message.msg_iovlen = size_t(count);
    const ssize_t n = sendmsg(c->fd.get(), &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return watch(*c, is_for_later(errno) ? kBoth : kIn);
    line.flow->sent(size_t(n));
  }
  watch(*c, kIn);
  if (line.retired && line.flow->delivered() && line.flow->peer_finished()) drop(*c), close(line);
}

void Network::close(Line& line) {
  line.closed = true;
  if (line.retired) line.flow.reset();  // its link is gone
}

// What has come; straight into the ring where it is much.
bool Network::read(Line& line) {
  char buffer[kBufferBytes];
  bool moved = false;
  for (size_t bytes = 0; bytes < kReadBytes;) {
    std::array<iovec, 2> pieces{line.flow->to_receive(), iovec{buffer, sizeof buffer}};
    const ssize_t n = readv(line.connection->fd.get(), pieces.data(), int(pieces.size()));
    if (n < 0 && is_for_later(errno)) return moved;
    if (n <= 0) return broke(line, n < 0 ? std::strerror(errno) : "closed by the other side"), true;
    const size_t direct = std::min(size_t(n), pieces[0].iov_len);
    try {
      line.flow->came(direct);
      line.flow->feed({buffer, size_t(n) - direct});
    } catch (const Error& error) {
      throw Error(error.code(), contact(line).name + ": " + error.what());
    }
    mark(line);  // there may be something to acknowledge
    moved = true;
    bytes += size_t(n);
    if (size_t(n) < pieces[0].iov_len + pieces[1].iov_len) return true;
  }
  return moved;
}

bool Network::serve(Connection& c, uint32_t events) {
  if (c.connecting) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(c.fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error) return fail(*c.line, error), true;
    c.connecting = false, c.since_ns = now_ns();
    c.out += c.shake.take_output();
    return push(c), true;
  }
  if (events & EPOLLOUT && !c.out.empty() && !push(c)) return true;
  if (!c.up) return shake(c), true;
  Line& line = *c.line;
  if (events & EPOLLOUT) write(line);
  return line.connection && events & ~uint32_t(EPOLLOUT) ? read(line) : true;
}

bool Network::step() {
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), int(events.size()), 0);
  bool moved = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t number = events[size_t(i)].data.u64;
    if (number == 0) {
      accept_guests();
      moved = true;
    } else if (auto it = connections_.find(number); it != connections_.end()) {
      moved |= serve(*it->second, events[size_t(i)].events);
    }
  }
  if (restless_ > 0)
    if (const uint64_t now = now_ns(); now - looked_ns_ >= kLookNs) look_after(looked_ns_ = now);
  return moved;
}

void Network::wait(uint64_t timeout_ns, int also) {
  if (restless_ > 0) timeout_ns = std::min(timeout_ns, kLookNs);
  pollfd fds[] = {{epoll_.get(), POLLIN, 0}, {also, POLLIN, 0}};
  const timespec timeout{time_t(timeout_ns / 1'000'000'000), long(timeout_ns % 1'000'000'000)};
  ppoll(fds, 2, timeout_ns == UINT64_MAX ? nullptr : &timeout, nullptr);
}

}  // namespace lightcc
