#include "net/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/types.h"
#include "base/wire.h"

namespace lightcc {
namespace {

constexpr uint32_t kMagic = 0x4c434331;  // "LCC1"
constexpr size_t kNoteBytes = 4096, kMaxFds = 4;
constexpr uint64_t kRetryNs = 2'000'000;

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Abstract names start with a zero byte and end with the length.
  size_t n = std::min(name.size(), sizeof address.sun_path - 1);
  if (name.size() > n) throw Error(Code::internal, "the job's name is too long for a socket: " + name);
  std::memcpy(address.sun_path + 1, name.data(), n);
  length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

bool same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

// SOCK_SEQPACKET: one card, one message. False: the peer is gone or what came is no card.
bool send_card(int fd, int rank, const Card& card) {
  std::string body = WireWriter().put(kMagic).put(rank).put(card.note).take();
  iovec io{body.data(), body.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr message{};
  message.msg_iov = &io, message.msg_iovlen = 1;
  if (!card.fds.empty()) {
    message.msg_control = control, message.msg_controllen = CMSG_SPACE(sizeof(int) * card.fds.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * card.fds.size());
    std::vector<int> numbers;
    for (const Fd& fd : card.fds) numbers.push_back(fd.get());
    std::memcpy(CMSG_DATA(header), numbers.data(), numbers.size() * sizeof(int));
  }
  return sendmsg(fd, &message, MSG_NOSIGNAL) == ssize_t(body.size());
}

bool receive_card(int fd, int& rank, Card& card) {
  char body[kNoteBytes];
  iovec io{body, sizeof body};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  msghdr message{};
  message.msg_iov = &io, message.msg_iovlen = 1;
  message.msg_control = control, message.msg_controllen = sizeof control;
  ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (n <= 0) return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int one;
      std::memcpy(&one, CMSG_DATA(header) + at, sizeof one);
      card.fds.emplace_back(one);
    }
  }
  try {
    WireReader reader({body, size_t(n)});
    if (reader.get<uint32_t>() != kMagic) return false;
    rank = reader.get<int>();
    card.note = reader.text();
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool readable_before(int fd, uint64_t deadline_ns) {
  for (uint64_t now = now_ns(); now < deadline_ns; now = now_ns()) {
    pollfd wait{fd, POLLIN, 0};
    int ready = poll(&wait, 1, int(std::min<uint64_t>((deadline_ns - now) / 1'000'000 + 1, 1000)));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw system_error("waiting for the other ranks");
  }
  return false;
}

[[noreturn]] void missing(const std::string& who) {
  throw Error(Code::timeout, "init: " + who + " did not come before HOROVOD_START_TIMEOUT; did all ranks start?");
}

std::vector<Card> meet_as_host(const std::string& name, int size, Card mine, uint64_t deadline_ns) {
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t length;
  sockaddr_un address = address_of(name, length);
  while (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE || now_ns() > deadline_ns) throw system_error("init: rank 0 cannot listen for the others");
    std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
  }
  if (listen(listener.get(), SOMAXCONN) != 0) throw system_error("init: rank 0 cannot listen for the others");

  std::vector<Card> cards(size);
  std::vector<Fd> guests(size);
  std::vector<int> absent;
  for (int i = 1; i < size; ++i) absent.push_back(i);
  cards[0] = std::move(mine);
  while (!absent.empty() && readable_before(listener.get(), deadline_ns)) {
    Fd guest(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!guest || !same_user(guest.get())) continue;  // a stranger
    int rank = -1;
    Card card;
    uint64_t patience = std::min(deadline_ns, now_ns() + 1'000'000'000);
    if (!readable_before(guest.get(), patience) || !receive_card(guest.get(), rank, card)) continue;
    auto it = std::find(absent.begin(), absent.end(), rank);
    if (it == absent.end())
      throw Error(Code::invalid_argument, "init: two processes say they are rank " + std::to_string(rank));
    absent.erase(it);
    cards[rank] = std::move(card), guests[rank] = std::move(guest);
  }
  if (!absent.empty()) {
    std::string who = (absent.size() > 1 ? "ranks " : "rank ") + text_of(absent);
    for (auto& guest : guests)
      if (guest) send_card(guest.get(), -1, Card{who, {}});
    missing(who);
  }
  for (auto& guest : guests)
    for (int rank = 0; guest && rank < size; ++rank) send_card(guest.get(), rank, cards[rank]);
  return cards;
}

std::vector<Card> meet_as_guest(const std::string& name, int rank, int size, Card mine, uint64_t deadline_ns) {
  socklen_t length;
  sockaddr_un address = address_of(name, length);
  Fd host;
  for (;;) {
    host = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (connect(host.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) break;
    if (now_ns() > deadline_ns) missing("rank 0");
    std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
  }
  if (!same_user(host.get())) throw Error(Code::internal, "init: another user holds this job's name on this host");
  if (!send_card(host.get(), rank, mine)) throw system_error("init: rank 0 hung up");
  std::vector<Card> cards(size);
  // Rank 0 gives up at its own deadline and tells who is missing; ours is a little later.
  for (int i = 0; i < size; ++i) {
    int from = -1;
    Card card;
    if (!readable_before(host.get(), deadline_ns + 2'000'000'000)) missing("rank 0");
    if (!receive_card(host.get(), from, card)) throw Error(Code::peer_lost, "init: rank 0 died while the ranks met");
    if (from < 0) missing(card.note);
    cards.at(from) = std::move(card);
  }
  return cards;
}

}  // namespace

std::vector<Card> meet(const std::string& name, int rank, int size, Card mine, uint64_t deadline_ns) {
  if (size == 1) {
    std::vector<Card> alone;
    alone.push_back(std::move(mine));
    return alone;
  }
  return rank == 0 ? meet_as_host(name, size, std::move(mine), deadline_ns)
                   : meet_as_guest(name, rank, size, std::move(mine), deadline_ns);
}

}  // namespace lightcc
