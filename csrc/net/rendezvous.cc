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

// Whose card it is, in a world of which size. Instead of cards rank 0 may send why it refuses: rank kRefusal less the
// error's code, and the text as the note.
struct Sender { int rank, size; };
constexpr int kRefusal = -1;

// SOCK_SEQPACKET: one card, one message. False: the peer is gone or what came is no card.
bool send_card(int fd, Sender sender, const Card& card) {
  std::string body = WireWriter().put(kMagic).put(sender.rank).put(sender.size).put(card.note).take();
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

bool receive_card(int fd, Sender& sender, Card& card) {
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
    sender.rank = reader.get<int>(), sender.size = reader.get<int>();
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

Error missing(const std::string& who) {
  return Error(Code::timeout, "init: " + who + " did not come before HOROVOD_START_TIMEOUT; did all ranks start?");
}

Fd listen_at(const std::string& name, uint64_t deadline_ns) {
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  socklen_t length;
  sockaddr_un address = address_of(name, length);
  while (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE || now_ns() > deadline_ns) throw system_error("init: rank 0 cannot listen for the others");
    std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
  }
  if (listen(listener.get(), SOMAXCONN) != 0) throw system_error("init: rank 0 cannot listen for the others");
  return listener;
}

// Rank 0: takes the cards of the others. guests gets the connection of each that showed one.
void gather(const Fd& listener, std::vector<Card>& cards, std::vector<Fd>& guests, uint64_t deadline_ns) {
  const int size = int(cards.size());
  std::vector<int> absent;
  for (int i = 1; i < size; ++i) absent.push_back(i);
  while (!absent.empty() && readable_before(listener.get(), deadline_ns)) {
    Fd guest(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!guest || !same_user(guest.get())) continue;  // a stranger
    Sender sender{};
    Card card;
    uint64_t patience = std::min(deadline_ns, now_ns() + 1'000'000'000);
    if (!readable_before(guest.get(), patience) || !receive_card(guest.get(), sender, card)) continue;
    guests.push_back(std::move(guest));
    std::string who = "rank " + std::to_string(sender.rank);
    if (sender.size != size)
      throw Error(Code::invalid_argument, "init: " + who + " was started in a world of " + std::to_string(sender.size) +
                                              ", rank 0 in one of " + std::to_string(size));
    auto it = std::find(absent.begin(), absent.end(), sender.rank);
    if (it == absent.end()) throw Error(Code::invalid_argument, "init: two processes say they are " + who);
    absent.erase(it);
    cards[size_t(sender.rank)] = std::move(card);
  }
  if (!absent.empty()) throw missing((absent.size() > 1 ? "ranks " : "rank ") + text_of(absent));
}

std::vector<Card> meet_as_host(const std::string& name, int size, Card mine, uint64_t deadline_ns) {
  Fd listener = listen_at(name, deadline_ns);
  std::vector<Card> cards(size);
  cards[0] = std::move(mine);
  std::vector<Fd> guests;
  try {
    gather(listener, cards, guests, deadline_ns);
  } catch (const Error& error) {
    for (Fd& guest : guests) send_card(guest.get(), {kRefusal - int(error.code()), size}, {error.what(), {}});
    throw;
  }
  for (Fd& guest : guests)
    for (int rank = 0; rank < size; ++rank) send_card(guest.get(), {rank, size}, cards[size_t(rank)]);
  return cards;
}

std::vector<Card> meet_as_guest(const std::string& name, int rank, int size, Card mine, uint64_t deadline_ns) {
  socklen_t length;
  sockaddr_un address = address_of(name, length);
  Fd host;
  for (;;) {
    host = Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    if (connect(host.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) break;
    if (now_ns() > deadline_ns) throw missing("rank 0");
    std::this_thread::sleep_for(std::chrono::nanoseconds(kRetryNs));
  }
  if (!same_user(host.get())) throw Error(Code::internal, "init: another user holds this job's name on this host");
  if (!send_card(host.get(), {rank, size}, mine)) throw system_error("init: rank 0 hung up");
  std::vector<Card> cards(size);
  // Rank 0 gives up at its own deadline and tells who is missing; ours is a little later.
  for (int i = 0; i < size; ++i) {
    Sender sender{};
    Card card;
    if (!readable_before(host.get(), deadline_ns + 2'000'000'000)) throw missing("rank 0");
    if (!receive_card(host.get(), sender, card)) throw Error(Code::peer_lost, "init: rank 0 died while the ranks met");
    if (sender.rank < 0) throw Error(Code(kRefusal - sender.rank), card.note);
    cards.at(size_t(sender.rank)) = std::move(card);
  }
  return cards;
}

}  // namespace

Fd be_found(const std::string& name) { return listen_at(name, 0); }

bool is_found(const std::string& name) {
  socklen_t length;
  const sockaddr_un address = address_of(name, length);
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  // The kernel tells whose listener it is without its help, so nobody need accept.
  return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 && same_user(fd.get());
}

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
