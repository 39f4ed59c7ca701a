#include "net/bootstrap/local_exchange_message.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/shortage.h"
#include "base/wire.h"

namespace lightcc {
namespace {

constexpr uint32_t kLocalMagic = 0x4c434332;  // "LCC2"
constexpr size_t kMaxFds = 4;

sockaddr_un address_of(const std::string& name, socklen_t& length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Abstract names start with a zero byte and end with the length.
  const size_t n = std::min(name.size(), sizeof address.sun_path - 1);
  if (name.size() > n) throw Error(Code::internal, "the job's name is too long for a socket: " + name);
  std::memcpy(address.sun_path + 1, name.data(), n);
  length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

// The other end may close at any time, with something of ours unread: one call then fails, and the next ones get what
// the other end had said before.
template <class Receive> ssize_t despite_reset(Receive receive) {
  const ssize_t n = receive();
  return n < 0 && errno == ECONNRESET ? receive() : n;
}

}  // namespace

LocalSent send_message(int fd, const LocalMessage& message) {
  WireWriter writer;
  writer.put(kLocalMagic).put(message.rank).put(message.size).put(message.round).put(message.refusal);
  std::string body = writer.put(message.info.note).take();
  iovec io{body.data(), body.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr head{};
  head.msg_iov = &io;
  head.msg_iovlen = 1;
  if (const auto& fds = message.info.fds; !fds.empty()) {
    head.msg_control = control;
    head.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* rights = CMSG_FIRSTHDR(&head);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::vector<int> numbers;
    for (const Fd& one : fds) numbers.push_back(one.get());
    std::memcpy(CMSG_DATA(rights), numbers.data(), numbers.size() * sizeof(int));
  }
  const ssize_t n = sendmsg(fd, &head, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n == ssize_t(body.size())) return LocalSent::yes;
  if (errno == EMSGSIZE)
    throw Error(Code::internal, "init: what a rank has to tell the others of its host is " +
                                    std::to_string(body.size()) +
                                    " bytes, more than a local socket takes (sysctl net.core.wmem_default)");
  // ETOOMANYREFS: a user may have so many descriptors on their way as one process may have open.
  const bool later = errno == EAGAIN || errno == EINTR || errno == ETOOMANYREFS || is_shortage(errno);
  return later ? LocalSent::later : LocalSent::never;
}

LocalReceived receive_message(int fd, LocalMessage& message) {
  // Its length first: a packet that is longer than the buffer would lose its end.
  ssize_t n = despite_reset([&] { return recv(fd, nullptr, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT); });
  if (n < 0) return errno == EAGAIN || errno == EINTR ? LocalReceived::later : LocalReceived::nothing;
  if (n == 0) return LocalReceived::nothing;
  std::string body(size_t(n), '\0');
  iovec io{body.data(), body.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  msghdr head{};
  head.msg_iov = &io;
  head.msg_iovlen = 1;
  head.msg_control = control;
  head.msg_controllen = sizeof control;
  n = despite_reset([&] { return recvmsg(fd, &head, MSG_CMSG_CLOEXEC | MSG_DONTWAIT); });
  message = {};
  for (cmsghdr* rights = n > 0 ? CMSG_FIRSTHDR(&head) : nullptr; rights; rights = CMSG_NXTHDR(&head, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= rights->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int one;
      std::memcpy(&one, CMSG_DATA(rights) + at, sizeof one);
      message.info.fds.emplace_back(one);
    }
  }
  if (n != ssize_t(body.size()) || head.msg_flags & MSG_TRUNC) return LocalReceived::nothing;
  message.complete = !(head.msg_flags & MSG_CTRUNC);
  try {
    WireReader reader(body);
    if (reader.get<uint32_t>() != kLocalMagic) return LocalReceived::nothing;
    message.rank = reader.get<int>();
    message.size = reader.get<int>();
    message.round = reader.get<uint32_t>();
    message.refusal = reader.get_enum<Code>(int(Code::internal) + 1);
    message.info.note = reader.text();
    return reader.empty() ? LocalReceived::message : LocalReceived::nothing;
  } catch (const Error&) {
    return LocalReceived::nothing;
  }
}

Fd local_socket() {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw system_error("init: a socket for meeting the ranks of this host");
  return fd;
}

int connect_local(int fd, const std::string& name) {
  socklen_t length;
  const sockaddr_un address = address_of(name, length);
  return connect(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 ? 0 : errno;
}

int bind_local(int fd, const std::string& name) {
  socklen_t length;
  const sockaddr_un address = address_of(name, length);
  return bind(fd, reinterpret_cast<const sockaddr*>(&address), length) == 0 ? 0 : errno;
}

std::optional<uid_t> user_of(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return {};
  return peer.uid;
}

bool same_user(int fd) { return user_of(fd) == geteuid(); }

}  // namespace lightcc
