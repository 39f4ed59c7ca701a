#include "net/health/host_probes.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace lightcc {

TcpProbes::TcpProbes(JobCredentials credentials, int rank, std::vector<Address> listens_at, const Address& from)
    : credentials_(std::move(credentials)),
      rank_(rank),
      listens_at_(std::move(listens_at)),
      from_(from),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw system_error("watching connections that ask whether hosts are alive");
}

void TcpProbes::ask(int rank, uint64_t now_ns) {
  const Address& to = listens_at_[size_t(rank)];
  Fd fd(socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd || connect_from(fd, to, from_) != 0) return;
  const Hello hello{.purpose = Purpose::probe, .from = rank_, .to = rank};
  probes_.emplace_back(std::move(fd), Handshake::connector(credentials_, hello), rank, now_ns);
  if (!watch(probes_.back(), EPOLLOUT, EPOLL_CTL_ADD)) probes_.pop_back();
}

bool TcpProbes::watch(Probe& probe, uint32_t events, int operation) {
  epoll_event event{events, {}};
  event.data.ptr = &probe;
  return epoll_ctl(epoll_.get(), operation, probe.fd(), &event) == 0;
}

TcpProbes::Progress TcpProbes::go_on(Probe& probe) {
  if (!probe.is_connected) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(probe.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return Progress::failed;
    probe.is_connected = true;
  } else if (const auto received = probe.receive(); received && received->error != 0) {
    return Progress::failed;
  }
  const Handshake::State state = probe.handshake().state();
  if (state != Handshake::State::going)
    return state == Handshake::State::done ? Progress::answered : Progress::failed;
  switch (probe.send()) {
    case HandshakeConnection::Sent::broken: return Progress::failed;
    case HandshakeConnection::Sent::all: watch(probe, EPOLLIN, EPOLL_CTL_MOD); break;
    case HandshakeConnection::Sent::later: watch(probe, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD); break;
  }
  return Progress::going;
}

// A forked child may still have the connection; then closing it would not take it out of the epoll set.
std::list<TcpProbes::Probe>::iterator TcpProbes::give_up(std::list<Probe>::iterator probe) {
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, probe->fd(), nullptr);
  return probes_.erase(probe);
}

std::vector<int> TcpProbes::step(uint64_t now_ns) {
  std::vector<int> ranks;
  std::array<epoll_event, 64> events;
  const int count = probes_.empty() ? 0 : epoll_wait(epoll_.get(), events.data(), int(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    auto* const probe = static_cast<Probe*>(events[size_t(i)].data.ptr);
    const Progress progress = go_on(*probe);
    if (progress == Progress::going) continue;
    if (progress == Progress::answered) ranks.push_back(probe->rank);
    give_up(std::find_if(probes_.begin(), probes_.end(), [&](const Probe& one) { return &one == probe; }));
  }
  while (!probes_.empty() && now_ns >= probes_.front().since_ns + kLongestNs) give_up(probes_.begin());
  return ranks;
}

}  // namespace lightcc
