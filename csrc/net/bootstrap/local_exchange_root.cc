#include "net/bootstrap/local_exchange_root.h"

#include <algorithm>
#include <cerrno>

#include "base/close_elsewhere.h"
#include "base/shortage.h"
#include "base/text.h"
#include "net/bootstrap/exchange_frames.h"

namespace lightcc {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kPauseNs = 50 * kMs;             // between two looks whether there is a descriptor again
constexpr int kClientsAtOnce = 64;                  // so that connected clients are served between

// Why a name cannot be had: the process that holds it.
std::string holder_of(const std::string& name) {
  Fd probe = local_socket();
  const bool known = connect_local(probe.get(), name) == 0;
  const std::optional<uid_t> user = known ? user_of(probe.get()) : std::nullopt;
  close_elsewhere(std::move(probe));
  return (user ? "a process of user " + std::to_string(*user) : "another process") +
         " holds this job's name on this host (@" + name + ")";
}

}  // namespace

LocalExchangeRoot::LocalExchangeRoot(std::vector<std::string> names, int size)
    : names_(std::move(names)), size_(size), opened_ns_(now_ns()), pending_(size_t(size)) {}

std::vector<RankInfo> LocalExchangeRoot::exchange(RankInfo mine, const Deadline& deadline) {
  if (failure_) throw *failure_;
  std::vector<LocalMessage> all(static_cast<size_t>(size_));
  all[0].info = std::move(mine);
  try {
    if (listeners_.empty()) listen(deadline);
    while (!absent().empty()) {
      if (deadline.over()) throw deadline.error(missing(deadline.ns));
      serve(deadline);
    }
    for (Client& client : clients_)
      if (client.rank > 0)
        all[size_t(client.rank)].info = std::move(*client.info), client.info.reset(), client.infos_sent = 0;
    for (int rank = 0; rank < size_; ++rank)
      all[size_t(rank)].rank = rank, all[size_t(rank)].size = size_, all[size_t(rank)].round = round_;
    send_to_all(all, deadline);
  } catch (const Error& error) {
    tell_failure(error, deadline.cancellation, kRootFailureNoticeNs);
    throw;
  }
  ++round_;
  std::vector<RankInfo> infos;
  for (LocalMessage& message : all) infos.push_back(std::move(message.info));
  return infos;
}

void LocalExchangeRoot::fail(const Error& error, const Cancellation* cancellation) {
  if (failure_) return;
  tell_failure(Error(error.code(), "rank 0: " + std::string(error.what())), cancellation, kOwnFailureNoticeNs);
}

void LocalExchangeRoot::listen(const Deadline& deadline) {
  if (size_ == 1) return;
  for (const std::string& name : names_) {
    Fd listener = local_socket();
    int error;
    const bool needed = listeners_.empty();
    while ((error = bind_local(listener.get(), name)) == EADDRINUSE && needed && sleep_until(deadline)) {
    }
    if (!error && ::listen(listener.get(), SOMAXCONN) != 0) error = errno;
    if (!error) listeners_.push_back(std::move(listener));
    else if (needed)
      throw deadline.error(Error(Code::internal, "init: rank 0 cannot listen for the others: " +
                                                     (error == EADDRINUSE ? holder_of(name) : reason_of(error))));
  }
}

void LocalExchangeRoot::serve(const Deadline& until) {
  if (until.over()) return;
  std::vector<pollfd> polled;
  for (const Client& client : clients_) polled.push_back({client.fd.get(), POLLIN, 0});
  const size_t clients = polled.size();
  const bool paused = now_ns() < paused_until_ns_;
  for (const Fd& listener : listeners_) polled.push_back({listener.get(), short(paused ? 0 : POLLIN), 0});
  const int n = poll_until(polled, until, paused ? kPauseNs : 250 * kMs);
  if (n < 0 && errno != EINTR) throw system_error("init: waiting for the other ranks of this host");
  if (n <= 0) return;
  for (size_t i = 0; i < clients; ++i) {
    if (!polled[i].revents) continue;
    const auto client = std::find_if(clients_.begin(), clients_.end(),
                                     [&](const Client& one) { return one.fd.get() == polled[i].fd; });
    if (client != clients_.end()) on_readable(*client);
  }
  for (size_t i = clients; i < polled.size(); ++i)
    if (polled[i].revents) accept_some(polled[i].fd);
}

void LocalExchangeRoot::accept_some(int listener) {
  for (int i = 0; i < kClientsAtOnce; ++i) {
    Fd fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd && is_shortage(errno)) {
      shortage_ = reason_of(errno);
      const auto overdue = pending_.overdue(now_ns());
      if (!overdue) return void(paused_until_ns_ = now_ns() + kPauseNs);
      drop(int(*overdue));
      continue;
    }
    if (!fd) return;
    shortage_.clear();
    if (!same_user(fd.get())) {
      ++unauthenticated_;
      close_elsewhere(std::move(fd));
      continue;
    }
    if (const auto surplus = pending_.surplus()) drop(int(*surplus));
    pending_.add(uint64_t(fd.get()), now_ns());
    clients_.emplace_back().fd = std::move(fd);
  }
}

void LocalExchangeRoot::on_readable(Client& client) {
  LocalMessage message;
  switch (receive_message(client.fd.get(), message)) {
    case LocalReceived::later: return;
    case LocalReceived::message: return on_message(client, std::move(message));
    case LocalReceived::nothing:
      const int rank = client.rank;
      drop(client.fd.get());
      if (rank < 0) ++unauthenticated_;
      if (rank >= 0 && !failure_)
        throw Error(Code::peer_lost, "init: " + rank_text(rank) + " left while the ranks met");
  }
}

void LocalExchangeRoot::on_message(Client& client, LocalMessage message) {
  const std::string who = rank_text(message.rank);
  if (failure_) return;
  if (message.refusal != Code::ok) throw Error(message.refusal, who + ": " + message.info.note);
  if (message.size != size_)
    throw Error(Code::invalid_argument, "init: " + who + " was started in a world of " + std::to_string(message.size) +
                                            ", rank 0 in one of " + std::to_string(size_));
  const bool known = client.rank >= 0;
  const bool again = !known && std::any_of(clients_.begin(), clients_.end(),
                                           [&](const Client& other) { return other.rank == message.rank; });
  if (again || message.rank == 0)
    throw Error(Code::invalid_argument, "init: two processes say they are " + who);
  if (message.rank < 0 || message.rank >= size_ || (known && message.rank != client.rank) ||
      message.round != client.round || client.info)
    throw Error(Code::internal, "init: " + who + " does not speak as rank 0 does: do all ranks run the same build?");
  if (!message.complete)
    throw Error(Code::internal, "init: the descriptors of " + who + " did not arrive at rank 0: " + reason_of(EMFILE));
  pending_.remove(uint64_t(client.fd.get()));
  client.rank = message.rank;
  ++client.round;
  client.info = std::move(message.info);
}

void LocalExchangeRoot::send_to_all(const std::vector<LocalMessage>& all, const Deadline& deadline) {
  const Deadline until = deadline.at(std::max(deadline.ns, now_ns()) + kRootDeliveryNs);
  for (;;) {
    std::vector<int> slow;
    for (Client& client : clients_) {
      if (client.rank < 0) continue;
      LocalSent sent = LocalSent::yes;
      while (client.infos_sent < size_ &&
             (sent = send_message(client.fd.get(), all[size_t(client.infos_sent)])) == LocalSent::yes)
        ++client.infos_sent;
      if (sent == LocalSent::never) {
        const std::string who = rank_text(client.rank);
        on_readable(client);  // it may have said why
        throw Error(Code::peer_lost, "init: " + who + " left while the ranks met");
      }
      if (client.infos_sent < size_) slow.push_back(client.rank);
    }
    if (slow.empty()) return;
    if (!sleep_until(until, kMs))
      throw until.error(Error(Code::timeout, "init: " + text_of_some(slow) + " did not take the notes of the others" +
                                                 in_time(deadline.ns) + "; stopped?"));
  }
}

// All clients are told, and those that connect within notice_ns.
void LocalExchangeRoot::tell_failure(const Error& error, const Cancellation* cancellation, uint64_t notice_ns) {
  failure_ = error;
  LocalMessage refusal;
  refusal.size = size_;
  refusal.round = round_;
  refusal.refusal = error.code();
  refusal.info.note = error.what();
  const Deadline last(now_ns() + notice_ns, cancellation);
  const bool late = error.code() == Code::timeout;  // a rank that is absent now has had the time
  for (int told = 0;;) {
    try {
      if (listeners_.empty()) listen(0);
      for (Client& client : clients_) {
        if (client.told) continue;
        // Nothing of theirs is left unread: it would reset the connection, and what it had to say be lost.
        LocalMessage unread;
        while (receive_message(client.fd.get(), unread) == LocalReceived::message) {
        }
        if (send_message(client.fd.get(), refusal) != LocalSent::later) {
          client.told = true;
          ++told;
        }
      }
      const bool all = std::all_of(clients_.begin(), clients_.end(), [](const Client& client) { return client.told; });
      if (last.over() || (all && (late || told >= size_ - 1))) break;
      serve(last.at(std::min(last.ns, now_ns() + 10 * kMs)));
    } catch (const Error&) {  // a rank that cannot be told will miss this one
      break;
    }
  }
  clients_.clear();
  close_listeners();
}

void LocalExchangeRoot::close_listeners() {
  for (Fd& listener : listeners_) close_listener(std::move(listener));
  listeners_.clear();
}

void LocalExchangeRoot::drop(int fd) {
  pending_.remove(uint64_t(fd));
  clients_.remove_if([&](const Client& client) { return client.fd.get() == fd; });
  paused_until_ns_ = 0;
}

std::vector<int> LocalExchangeRoot::absent() const {
  std::vector<char> here(size_t(size_), 0);
  for (const Client& client : clients_)
    if (client.info) here[size_t(client.rank)] = 1;
  std::vector<int> ranks;
  for (int rank = 1; rank < size_; ++rank)
    if (!here[size_t(rank)]) ranks.push_back(rank);
  return ranks;
}

std::string LocalExchangeRoot::in_time(uint64_t deadline_ns) const {
  return " before " + start_timeout(deadline_ns - std::min(deadline_ns, opened_ns_));
}

Error LocalExchangeRoot::missing(uint64_t deadline_ns) const {
  const std::string who = text_of_some(absent());
  if (!shortage_.empty())
    return Error(Code::internal, "init: rank 0 could not take the connections of " + who + in_time(deadline_ns) + ": " +
                                     shortage_);
  std::string text = "init: " + who + " did not come" + in_time(deadline_ns) + kDidAllStart;
  if (unauthenticated_)
    text += ". Connections of other users of this host, or of who does not speak as lightcc does: " +
            std::to_string(unauthenticated_);
  return Error(Code::timeout, text);
}

}  // namespace lightcc
