// The connections of rank 0's side: accepted, authenticated, read, written to and dropped. What they say:
// exchange_root.cc.
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/shortage.h"
#include "net/bootstrap/exchange_root.h"

namespace lightcc {
namespace {

constexpr uint64_t kHandshakeNs = 5'000'000'000;  // a client that has not authenticated by then is dropped
constexpr int kAcceptsAtOnce = 64;                // so that connected clients are served between

}  // namespace

void ExchangeRoot::watch(int how, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  if (epoll_ctl(epoll_.get(), how, fd, &event) != 0) throw system_error("init: rank 0 cannot serve the others");
}

void ExchangeRoot::accept_some() {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd && is_shortage(errno)) {
      const int error = errno;
      const auto overdue = pending_.overdue(now_ns());
      if (!overdue) return pause_accepting(error);
      evict(int(*overdue));
      continue;
    }
    if (!fd) return;  // nobody more; others' errors are those of the connection that was lost before it was taken
    shortage_.clear();
    if (const auto surplus = pending_.surplus()) evict(int(*surplus));
    const int on = 1, number = fd.get();
    setsockopt(number, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    Client client(std::move(fd), credentials_);
    try {
      client.seen = peer_address(number);
      client.at = local_address(number);
      client.since_ns = now_ns();
    } catch (const Error&) {
      continue;  // it has gone already
    }
    watch(EPOLL_CTL_ADD, number, EPOLLIN);
    pending_.add(uint64_t(number), client.since_ns);
    clients_.emplace(number, std::move(client));
  }
}

// New connections wait in the listener's queue, and this loop does not spin meanwhile.
void ExchangeRoot::pause_accepting(int error) {
  shortage_ = reason_of(error);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
  paused_until_ns_ = now_ns() + kPauseNs;
}

void ExchangeRoot::evict(int fd) {
  Client& client = clients_.at(fd);
  unauthenticated_.add(client.seen.text());
  drop(client);
  std::erase(dropped_, fd);
  clients_.erase(fd);
}

void ExchangeRoot::on_readable(Client& client) {
  while (!is_dropped(client)) {
    try {
      if (!read_some(client)) return;
    } catch (const Error&) {  // nothing that a rank would send
      return drop(client);
    }
  }
}

// False: nothing more has come.
bool ExchangeRoot::read_some(Client& client) {
  if (client.handshake_state() == Handshake::State::going) {
    const auto received = client.connection.receive();
    if (!received) return false;
    if (received->error) return drop(client), false;
    on_handshake(client);
    on_frames(client, received->rest);
    return true;
  }
  char bytes[16 << 10];
  const ssize_t n = recv(client.fd(), bytes, sizeof bytes, 0);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && errno == EAGAIN) return false;
  if (n <= 0) return drop(client), false;
  on_frames(client, {bytes, size_t(n)});
  return true;
}

void ExchangeRoot::on_frames(Client& client, std::string_view bytes) {
  if (client.handshake_state() != Handshake::State::done || client.leaving) return;
  client.frames.feed(bytes);
  while (auto frame = client.frames.take()) on_frame(client, *frame);
}

void ExchangeRoot::on_handshake(Client& client) {
  using State = Handshake::State;
  Handshake& handshake = client.connection.handshake();
  if (handshake.state() == State::asked) {
    if (handshake.hello().purpose != Purpose::bootstrap)
      handshake.refuse(Error(Code::timeout, "the ranks are still meeting; nothing else is served yet"));
    else
      handshake.welcome(0);
  }
  if (handshake.state() == State::done) {
    pending_.remove(uint64_t(client.fd()));
    const uint64_t left = deadline_ns_ - std::min(deadline_ns_, now_ns());
    const std::string body = WireWriter().put(client.seen.text()).put(left).take();
    enqueue(client, std::make_shared<const std::string>(framed(FrameKind::greeting, body)));
  } else if (handshake.state() == State::refused) {
    // What another job's process was refused for is of no use in an error of this one.
    if (handshake.error()->code() != Code::mismatch) refused_ = handshake.error()->what();
    client.leaving = true;
    flush(client);
  } else if (handshake.state() == State::unauthenticated) {
    unauthenticated_.add(client.seen.text());
    drop(client);
  } else {
    flush(client);
  }
}

void ExchangeRoot::enqueue(Client& client, std::shared_ptr<const std::string> text) {
  if (client.out.empty()) ++unsent_;
  client.out.push_back(std::move(text));
  flush(client);
}

void ExchangeRoot::flush(Client& client) {
  if (is_dropped(client)) return;
  using Sent = HandshakeConnection::Sent;
  Sent sent = client.connection.send();
  while (sent == Sent::all && !client.out.empty()) {
    const std::string& text = *client.out.front();
    const ssize_t n =
        send(client.fd(), text.data() + client.sent, text.size() - client.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      sent = errno == EAGAIN ? Sent::later : Sent::broken;
      break;
    }
    client.sent += size_t(n);
    if (client.sent < text.size()) continue;
    client.out.pop_front();
    client.sent = 0;
    if (client.out.empty()) --unsent_;
  }
  if (sent == Sent::later) return watch(EPOLL_CTL_MOD, client.fd(), EPOLLIN | EPOLLOUT);
  if (!client.out.empty()) {  // reading will tell that it is gone
    client.out.clear();
    client.sent = 0;
    --unsent_;
  }
  watch(EPOLL_CTL_MOD, client.fd(), EPOLLIN);
  if (client.leaving) shutdown(client.fd(), SHUT_WR);
}

void ExchangeRoot::drop(Client& client) {
  if (is_dropped(client)) return;
  const int rank = client.rank();
  if (!client.out.empty()) {
    client.out.clear();
    --unsent_;
  }
  if (client.come) {
    by_rank_[size_t(rank)] = nullptr;
    if (client.note) --noted_;
    // Once it has what it came for it may leave; whether that was too early the next round shows.
    if (complete_) {
      gone_.push_back(rank);
    } else if (!failure_) {
      std::vector<int> others = absent();
      std::erase(others, rank);
      failure_ = Error(Code::peer_lost, "init: rank " + std::to_string(rank) + " at " + client.seen.text() +
                                            " left while the ranks met" +
                                            (others.empty() ? "" : ", before " + text_of_some(others) + " had come"));
    }
  }
  client.come = false;
  client.leaving = true;
  pending_.remove(uint64_t(client.fd()));
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, client.fd(), nullptr);
  dropped_.push_back(client.fd());
}

bool ExchangeRoot::is_dropped(const Client& client) const {
  return std::find(dropped_.begin(), dropped_.end(), client.fd()) != dropped_.end();
}

void ExchangeRoot::drop_overdue() {
  const uint64_t now = now_ns();
  if (now - swept_ns_ < kSweepNs) return;
  swept_ns_ = now;
  for (auto& [fd, client] : clients_) {
    if (client.handshake_state() == Handshake::State::done || now - client.since_ns < kHandshakeNs) continue;
    if (client.handshake_state() == Handshake::State::going) unauthenticated_.add(client.seen.text());
    drop(client);
  }
  for (int fd : std::exchange(dropped_, {})) clients_.erase(fd);
}

}  // namespace lightcc
