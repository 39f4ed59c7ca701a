#include "net/bootstrap/exchange_root.h"

#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "base/shortage.h"

namespace lightcc {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr int kSpareFds = 64;                   // of a process, beside one for each rank

Fd new_epoll() {
  Fd fd(epoll_create1(EPOLL_CLOEXEC));
  if (!fd) throw system_error("init: rank 0 cannot serve the others");
  return fd;
}

// Every rank is a connection, others may connect too, and the usual limit of descriptors is 1024.
std::optional<Error> allow_connections(int ranks) {
  rlimit limit{};
  const rlim_t needed = rlim_t(ranks) + kSpareFds, wanted = needed + rlim_t(ranks) + PendingConnections::kSpare;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return {};
  if (limit.rlim_max < needed)
    return Error(Code::internal, "init: rank 0 needs " + std::to_string(needed) + " descriptors to serve " +
                                     std::to_string(ranks) + " ranks and may have " + std::to_string(limit.rlim_max) +
                                     "; raise its limit (ulimit -n)");
  allow_descriptors(wanted);
  return {};
}

bool same_host(const Address& a, const Address& b) { return a.is_loopback() || a.same_host(b); }

}  // namespace

ExchangeRoot::ExchangeRoot(int size, const JobCredentials& credentials, Fd listener)
    : size_(size),
      credentials_(credentials),
      listener_(std::move(listener)),
      epoll_(new_epoll()),
      opened_ns_(now_ns()),
      by_rank_(size_t(size), nullptr),
      pending_(size_t(size)),
      failure_(allow_connections(size)) {  // if there is one, the first exchange tells it to all
  watch(EPOLL_CTL_ADD, listener_.get(), EPOLLIN);
}

std::vector<std::string> ExchangeRoot::exchange(const std::string& mine, const Deadline& deadline) {
  if (mine.size() > kMostNoteBytes) throw Error(Code::internal, "a note for the other ranks is longer than 64 KiB");
  deadline_ns_ = deadline.ns;
  if (!failure_ && !gone_.empty())
    failure_ = Error(Code::peer_lost, "init: " + text_of_some(gone_) + " left while the ranks met");
  while (!failure_ && noted_ < size_ - 1) {
    if (deadline.over())
      failure_ = deadline.error(missing(absent(), deadline.ns));
    else
      serve(deadline);
  }
  if (failure_) end(deadline.cancellation);

  for (Client* client : by_rank_)
    if (client && !own_ && !same_host(client->seen, client->at)) own_ = client->at;
  std::vector<std::string> notes{mine};
  WireWriter body;
  body.put(uint32_t(round_)).put(own_ ? own_.text() : std::string()).put(uint32_t(size_)).put(mine);
  for (int rank = 1; rank < size_; ++rank) {
    notes.push_back(std::move(*by_rank_[size_t(rank)]->note));
    by_rank_[size_t(rank)]->note.reset();
    body.put(notes.back());
  }
  ++round_;
  noted_ = 0;
  complete_ = true;
  const auto answer = std::make_shared<const std::string>(framed(FrameKind::all, body.take()));
  for (Client* client : std::vector<Client*>(by_rank_.begin() + 1, by_rank_.end())) enqueue(*client, answer);
  const Deadline last = deadline.at(std::max(deadline.ns, now_ns()) + kRootDeliveryNs);
  while (unsent_ > 0 && !failure_ && !last.over()) serve(last);
  complete_ = false;
  if (unsent_ > 0 && !failure_) {
    std::vector<int> slow;
    for (int rank = 1; rank < size_; ++rank)
      if (by_rank_[size_t(rank)] && !by_rank_[size_t(rank)]->out.empty()) slow.push_back(rank);
    failure_ = last.error(Error(Code::timeout, "init: " + text_of_some(slow) +
                                                   " did not take the notes of the others before " +
                                                   start_timeout(deadline.ns - opened_ns_) + "; stopped?"));
  }
  if (failure_) end(deadline.cancellation);
  return notes;
}

void ExchangeRoot::end(const Cancellation* cancellation) {
  tell_failure(cancellation, kRootFailureNoticeNs);
  throw *failure_;
}

void ExchangeRoot::fail(const Error& error, const Cancellation* cancellation) {
  if (!failure_) failure_ = Error(error.code(), "rank 0: " + std::string(error.what()));
  tell_failure(cancellation, kOwnFailureNoticeNs);
}

// All clients are told, and those that connect within notice_ns. It ends when they close: a connection that is closed
// here with unread bytes is reset, and the notice is lost.
void ExchangeRoot::tell_failure(const Cancellation* cancellation, uint64_t notice_ns) {
  if (failure_told_) return;  // exchange() has thrown it, and our caller brings it to fail()
  const auto frame = std::make_shared<const std::string>(failure_frame(*failure_));
  const bool late = failure_->code() == Code::timeout;  // a rank that is absent now has had the time
  const Deadline last(now_ns() + notice_ns, cancellation);
  auto tell = [&] {
    for (auto& [fd, client] : clients_) {
      if (client.leaving || client.handshake_state() != Handshake::State::done) continue;
      client.leaving = true;
      told_.insert(client.rank());
      enqueue(client, frame);
    }
  };
  tell();
  while ((!clients_.empty() || (!late && int(told_.size()) < size_ - 1)) && !last.over()) {
    serve(last);
    tell();
  }
  failure_told_ = true;
  clients_.clear();
  by_rank_.assign(size_t(size_), nullptr);
  unsent_ = 0;
}

void ExchangeRoot::serve(const Deadline& until) {
  drop_overdue();
  const uint64_t now = now_ns();
  if (until.over()) return;
  if (paused_until_ns_ && now >= paused_until_ns_) {
    paused_until_ns_ = 0;
    watch(EPOLL_CTL_ADD, listener_.get(), EPOLLIN);
  }
  std::vector<pollfd> epoll{{epoll_.get(), POLLIN, 0}};
  int n = poll_until(epoll, until, paused_until_ns_ ? kPauseNs : kSweepNs);
  epoll_event events[64];
  if (n > 0) n = epoll_wait(epoll_.get(), events, std::size(events), 0);
  if (n < 0 && errno != EINTR) throw system_error("init: waiting for the other ranks");
  for (int i = 0; i < n; ++i) {
    const int fd = events[i].data.fd;
    if (fd == listener_.get()) {
      accept_some();
      continue;
    }
    auto found = clients_.find(fd);
    if (found == clients_.end()) continue;
    if (events[i].events & EPOLLOUT) flush(found->second);
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(found->second);
  }
  if (!dropped_.empty() && paused_until_ns_) paused_until_ns_ = now;  // there are descriptors again
  for (int fd : std::exchange(dropped_, {})) clients_.erase(fd);
}

void ExchangeRoot::on_frame(Client& client, const Frame& frame) {
  if (failure_) return;
  const int rank = client.rank();
  const std::string who = "rank " + std::to_string(rank);
  if (frame.kind == FrameKind::failure) {
    const Error error = failure_in(frame);
    failure_ = Error(error.code(), who + ": " + error.what());
    return;
  }
  if (frame.kind != FrameKind::note) WireReader::fail();
  WireReader reader(frame.body);
  const auto round = reader.get<uint32_t>(), size = reader.get<uint32_t>();
  std::string note = reader.text();
  if (int(size) != size_ || rank < 1 || rank >= size_) {
    failure_ = Error(Code::invalid_argument, "init: " + who + " was started in a world of " + std::to_string(size) +
                                                 ", rank 0 in one of " + std::to_string(size_));
    return;
  }
  if (!client.come && by_rank_[size_t(rank)]) {
    failure_ =
        Error(Code::invalid_argument, "init: two processes say they are " + who + " (at " +
                                          by_rank_[size_t(rank)]->seen.text() + " and " + client.seen.text() + ")");
    return;
  }
  if (int(round) != round_ || client.note) WireReader::fail();
  client.come = true;
  by_rank_[size_t(rank)] = &client;
  client.note = std::move(note);
  ++noted_;
}

std::vector<int> ExchangeRoot::absent() const {
  std::vector<int> ranks;
  for (int rank = 1; rank < size_; ++rank)
    if (!by_rank_[size_t(rank)] || !by_rank_[size_t(rank)]->note) ranks.push_back(rank);
  return ranks;
}

Error ExchangeRoot::missing(const std::vector<int>& ranks, uint64_t deadline_ns) const {
  const std::string in_time = " before " + start_timeout(deadline_ns - std::min(deadline_ns, opened_ns_));
  if (!shortage_.empty())
    return Error(Code::internal, "init: rank 0 could not take the connections of " + text_of_some(ranks) + in_time +
                                     ": " + shortage_);
  std::string text = "init: " + text_of_some(ranks) + " did not come" + in_time + kDidAllStart;
  if (!refused_.empty()) text += ". A process was refused: " + refused_;
  UnauthenticatedConnections unauthenticated = unauthenticated_;
  for (const auto& [fd, client] : clients_)  // and those whose time is not over yet
    if (client.handshake_state() == Handshake::State::going &&
        now_ns() - client.since_ns > PendingConnections::kGraceNs)
      unauthenticated.add(client.seen.text());
  if (unauthenticated.count) text += "." + unauthenticated.text();
  return Error(Code::timeout, text);
}

}  // namespace lightcc
