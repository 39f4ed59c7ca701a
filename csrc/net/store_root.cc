#include "net/store_root.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
constexpr uint64_t kHandshakeNs = 5 * kSecond;  // who has not proven itself by then is a stranger
constexpr uint64_t kSweepNs = kSecond / 4;
constexpr uint64_t kFarewellNs = kSecond;      // for the others to hear of a failure
constexpr uint64_t kDeliveryNs = 2 * kSecond;  // after the deadline, for notes that are complete
constexpr int kSpareFds = 256;                 // of a process, beside one for each rank

Fd new_epoll() {
  Fd fd(epoll_create1(EPOLL_CLOEXEC));
  if (!fd) throw system_error("init: rank 0 cannot serve the others");
  return fd;
}

// Every rank is a connection, and the usual limit of descriptors is 1024.
void allow_connections(int ranks) {
  rlimit limit{};
  const rlim_t wanted = rlim_t(ranks) + kSpareFds;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  if (limit.rlim_max < wanted)
    throw Error(Code::internal, "init: rank 0 needs " + std::to_string(wanted) + " descriptors to serve " +
                                    std::to_string(ranks) + " ranks and may have " + std::to_string(limit.rlim_max) +
                                    "; raise the limit (ulimit -n)");
  limit.rlim_cur = wanted;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) throw system_error("init: raising rank 0's limit of descriptors");
}

void watch(int epoll, int how, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events, event.data.fd = fd;
  if (epoll_ctl(epoll, how, fd, &event) != 0) throw system_error("init: rank 0 cannot serve the others");
}

bool same_host(const Address& a, const Address& b) { return a.is_loopback() || a.same_host(b); }

}  // namespace

StoreRoot::StoreRoot(int size, const Terms& terms, Fd listener)
    : size_(size),
      terms_(terms),
      listener_(std::move(listener)),
      epoll_(new_epoll()),
      opened_ns_(now_ns()),
      by_rank_(size_t(size), nullptr) {
  allow_connections(size);
  watch(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), EPOLLIN);
}

std::vector<std::string> StoreRoot::exchange(const std::string& mine, uint64_t deadline_ns) {
  if (mine.size() > kMostNoteBytes) throw Error(Code::internal, "a note for the other ranks is longer than 64 KiB");
  deadline_ns_ = deadline_ns;
  if (!failure_ && !gone_.empty())
    failure_ = Error(Code::peer_lost, "init: " + text_of_some(gone_) + " left while the ranks met");
  while (!failure_ && noted_ < size_ - 1) {
    if (now_ns() >= deadline_ns)
      failure_ = missing(absent(), deadline_ns);
    else
      serve(deadline_ns);
  }
  if (failure_) end();

  for (Guest* guest : by_rank_)
    if (guest && !own_ && !same_host(guest->seen, guest->at)) own_ = guest->at;
  std::vector<std::string> notes{mine};
  WireWriter body;
  body.put(uint32_t(round_)).put(own_ ? own_.text() : std::string()).put(uint32_t(size_)).put(mine);
  for (int rank = 1; rank < size_; ++rank) {
    notes.push_back(std::move(*by_rank_[size_t(rank)]->note));
    by_rank_[size_t(rank)]->note.reset();
    body.put(notes.back());
  }
  ++round_, noted_ = 0, complete_ = true;
  const auto answer = std::make_shared<const std::string>(framed(FrameKind::all, body.take()));
  for (Guest* guest : std::vector<Guest*>(by_rank_.begin() + 1, by_rank_.end())) say(*guest, answer);
  const uint64_t last = std::max(deadline_ns, now_ns()) + kDeliveryNs;
  while (unsent_ > 0 && !failure_ && now_ns() < last) serve(last);
  complete_ = false;
  if (unsent_ > 0 && !failure_) {
    std::vector<int> slow;
    for (int rank = 1; rank < size_; ++rank)
      if (by_rank_[size_t(rank)] && !by_rank_[size_t(rank)]->out.empty()) slow.push_back(rank);
    failure_ = Error(Code::timeout, "init: " + text_of_some(slow) + " did not take the notes of the others before " +
                                        start_timeout(deadline_ns - opened_ns_) + "; stopped?");
  }
  if (failure_) end();
  return notes;
}

void StoreRoot::end() {
  tell_failure();
  throw *failure_;
}

void StoreRoot::fail(const Error& error) {
  if (!failure_) failure_ = Error(error.code(), "rank 0: " + std::string(error.what()));
  tell_failure();
}

// All who came are told, and those who come within the farewell. Their closing ends it: a connection that is closed
// with unread bytes is reset, and what it had to say is lost.
void StoreRoot::tell_failure() {
  const auto frame = std::make_shared<const std::string>(failure_frame(*failure_));
  const bool late = failure_->code() == Code::timeout;  // who is absent now has had the time
  const uint64_t last = now_ns() + kFarewellNs;
  auto tell = [&] {
    for (auto& [fd, guest] : guests_) {
      if (guest.leaving || guest.shake.state() != Handshake::State::done) continue;
      guest.leaving = true, told_.insert(guest.rank());
      say(guest, frame);
    }
  };
  tell();
  while ((!guests_.empty() || (!late && int(told_.size()) < size_ - 1)) && now_ns() < last) {
    serve(last);
    tell();
  }
  guests_.clear();
  by_rank_.assign(size_t(size_), nullptr);
  unsent_ = 0;
}

void StoreRoot::serve(uint64_t until_ns) {
  drop_strangers();
  const uint64_t now = now_ns();
  if (now >= until_ns) return;
  epoll_event events[64];
  const int n = epoll_wait(epoll_.get(), events, std::size(events),
                           int(std::min<uint64_t>((until_ns - now) / 1'000'000 + 1, 250)));
  if (n < 0 && errno != EINTR) throw system_error("init: waiting for the other ranks");
  for (int i = 0; i < n; ++i) {
    const int fd = events[i].data.fd;
    if (fd == listener_.get()) {
      accept_all();
      continue;
    }
    auto found = guests_.find(fd);
    if (found == guests_.end()) continue;
    if (events[i].events & EPOLLOUT) flush(found->second);
    if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(found->second);
  }
  for (int fd : std::exchange(dropped_, {})) guests_.erase(fd);
}

void StoreRoot::accept_all() {
  for (;;) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
        throw system_error("init: rank 0 cannot take a connection (ulimit -n)");
      return;  // nobody more; others' errors are those of the connection that was lost before it was taken
    }
    const int on = 1, number = fd.get();
    setsockopt(number, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    Guest guest(std::move(fd), terms_);
    try {
      guest.seen = peer_address(number), guest.at = local_address(number), guest.since_ns = now_ns();
    } catch (const Error&) {
      continue;  // it has gone already
    }
    watch(epoll_.get(), EPOLL_CTL_ADD, number, EPOLLIN);
    guests_.emplace(number, std::move(guest));
  }
}

void StoreRoot::on_readable(Guest& guest) {
  char bytes[16 << 10];
  for (;;) {
    if (is_dropped(guest)) return;
    const ssize_t n = recv(guest.fd.get(), bytes, sizeof bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return drop(guest);
    try {
      if (!guest.leaving) on_bytes(guest, {bytes, size_t(n)});
    } catch (const Error&) {  // what a rank of this job sends is no frame
      return drop(guest);
    }
  }
}

void StoreRoot::on_bytes(Guest& guest, std::string_view bytes) {
  using State = Handshake::State;
  while (!bytes.empty() && guest.shake.state() == State::going) {
    bytes.remove_prefix(guest.shake.feed(bytes));
    on_handshake(guest);
  }
  if (guest.shake.state() != State::done || guest.leaving) return;
  guest.frames.feed(bytes);
  while (auto frame = guest.frames.take()) on_frame(guest, *frame);
}

void StoreRoot::on_handshake(Guest& guest) {
  using State = Handshake::State;
  Handshake& shake = guest.shake;
  if (shake.state() == State::asked) {
    if (shake.hello().purpose != Purpose::store)
      shake.refuse(Error(Code::timeout, "the ranks are still meeting; nothing else is served yet"));
    else
      shake.welcome(0);
  }
  std::string text = shake.take_output();
  if (shake.state() == State::done) {
    const uint64_t left = deadline_ns_ - std::min(deadline_ns_, now_ns());
    text += framed(FrameKind::greeting, WireWriter().put(guest.seen.text()).put(left).take());
  }
  if (!text.empty()) say(guest, std::make_shared<const std::string>(std::move(text)));
  if (shake.state() == State::refused) {
    // A neighbour's job is none of our business.
    if (shake.error()->code() != Code::mismatch) refused_ = shake.error()->what();
    guest.leaving = true;
    flush(guest);
  } else if (shake.state() == State::stranger) {
    ++strangers_;
    drop(guest);
  }
}

void StoreRoot::on_frame(Guest& guest, const Frame& frame) {
  if (failure_) return;
  const int rank = guest.rank();
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
  if (!guest.come && by_rank_[size_t(rank)]) {
    failure_ =
        Error(Code::invalid_argument, "init: two processes say they are " + who + " (at " +
                                          by_rank_[size_t(rank)]->seen.text() + " and " + guest.seen.text() + ")");
    return;
  }
  if (int(round) != round_ || guest.note) WireReader::fail();
  guest.come = true, by_rank_[size_t(rank)] = &guest;
  guest.note = std::move(note), ++noted_;
}

void StoreRoot::say(Guest& guest, std::shared_ptr<const std::string> text) {
  if (guest.out.empty()) ++unsent_;
  guest.out.push_back(std::move(text));
  flush(guest);
}

void StoreRoot::flush(Guest& guest) {
  if (is_dropped(guest)) return;
  const bool had = !guest.out.empty();
  while (!guest.out.empty()) {
    const std::string& text = *guest.out.front();
    const ssize_t n =
        send(guest.fd.get(), text.data() + guest.sent, text.size() - guest.sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) break;  // reading will tell that it is gone
    if (n < 0) return watch(epoll_.get(), EPOLL_CTL_MOD, guest.fd.get(), EPOLLIN | EPOLLOUT);
    guest.sent += size_t(n);
    if (guest.sent == text.size()) guest.out.pop_front(), guest.sent = 0;
  }
  guest.out.clear(), guest.sent = 0;
  if (had) {
    --unsent_;
    watch(epoll_.get(), EPOLL_CTL_MOD, guest.fd.get(), EPOLLIN);
  }
  if (guest.leaving) shutdown(guest.fd.get(), SHUT_WR);
}

void StoreRoot::drop(Guest& guest) {
  if (is_dropped(guest)) return;
  const int rank = guest.rank();
  if (!guest.out.empty()) guest.out.clear(), --unsent_;
  if (guest.come) {
    by_rank_[size_t(rank)] = nullptr;
    if (guest.note) --noted_;
    // Once it has what it came for it may leave; whether that was too early the next round shows.
    if (complete_) {
      gone_.push_back(rank);
    } else if (!failure_) {
      std::vector<int> others = absent();
      std::erase(others, rank);
      failure_ = Error(Code::peer_lost, "init: rank " + std::to_string(rank) + " at " + guest.seen.text() +
                                            " left while the ranks met" +
                                            (others.empty() ? "" : ", before " + text_of_some(others) + " had come"));
    }
  }
  guest.come = false, guest.leaving = true;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, guest.fd.get(), nullptr);
  dropped_.push_back(guest.fd.get());
}

bool StoreRoot::is_dropped(const Guest& guest) const {
  return std::find(dropped_.begin(), dropped_.end(), guest.fd.get()) != dropped_.end();
}

void StoreRoot::drop_strangers() {
  const uint64_t now = now_ns();
  if (now - swept_ns_ < kSweepNs) return;
  swept_ns_ = now;
  for (auto& [fd, guest] : guests_) {
    if (guest.shake.state() == Handshake::State::done || now - guest.since_ns < kHandshakeNs) continue;
    if (guest.shake.state() == Handshake::State::going) ++strangers_;
    drop(guest);
  }
  for (int fd : std::exchange(dropped_, {})) guests_.erase(fd);
}

std::vector<int> StoreRoot::absent() const {
  std::vector<int> ranks;
  for (int rank = 1; rank < size_; ++rank)
    if (!by_rank_[size_t(rank)] || !by_rank_[size_t(rank)]->note) ranks.push_back(rank);
  return ranks;
}

Error StoreRoot::missing(const std::vector<int>& ranks, uint64_t deadline_ns) const {
  std::string text = "init: " + text_of_some(ranks) + " did not come before " +
                     start_timeout(deadline_ns - std::min(deadline_ns, opened_ns_)) + "; did all ranks start?";
  if (!refused_.empty()) text += " A process was refused: " + refused_ + ".";
  if (strangers_ > 0)
    text += " Connections of strangers, who do not know this job's secret or do not speak as lightcc does: " +
            std::to_string(strangers_) + ".";
  return Error(Code::timeout, text);
}

}  // namespace lightcc
