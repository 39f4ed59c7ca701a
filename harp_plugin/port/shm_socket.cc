#include "harp_plugin/port/shm_socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>

namespace harp {

using lightcc::Fd;
using lightcc::system_error;

namespace {

constexpr int kBacklog = 512;
constexpr size_t kMostDescriptors = 2;

struct Name {
  sockaddr_un address{};
  socklen_t bytes = 0;
  explicit Name(const Address& from) {
    constexpr char kHex[] = "0123456789abcdef";
    address.sun_family = AF_UNIX;
    size_t at = 1;  // sun_path[0] == 0: abstract
    for (const char c : {'h', 'a', 'r', 'p', '-'}) address.sun_path[at++] = c;
    for (size_t i = 0; i < from.size && i < from.bytes.size(); ++i) {
      address.sun_path[at++] = kHex[from.bytes[i] >> 4];
      address.sun_path[at++] = kHex[from.bytes[i] & 15];
    }
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + at);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Fd new_socket() { return Fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

bool same_user(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

}  // namespace

Address random_shm_address() {
  Address address;
  address.size = kShmAddressBytes;
  if (getrandom(address.bytes.data(), kShmAddressBytes, 0) != kShmAddressBytes) throw system_error("getrandom");
  return address;
}

Fd listen_on(const Address& address) {
  Fd listener = new_socket();
  const Name name(address);
  if (!listener || bind(listener.get(), name.get(), name.bytes) != 0 || listen(listener.get(), kBacklog) != 0) {
    throw system_error("listening on an abstract AF_UNIX socket");
  }
  return listener;
}

Fd connect_to(const Address& address) {
  if (address.size != kShmAddressBytes) return Fd();
  Fd socket = new_socket();
  const Name name(address);
  if (!socket || connect(socket.get(), name.get(), name.bytes) != 0 || !same_user(socket.get())) return Fd();
  return socket;
}

Fd accept_from(int listener, bool* more) {
  Fd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  *more = static_cast<bool>(socket);
  return socket && same_user(socket.get()) ? std::move(socket) : Fd();
}

bool send_message(int socket, const ShmMessage& message, std::initializer_list<int> descriptors) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
  iovec part{const_cast<ShmMessage*>(&message), sizeof message};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (descriptors.size() > 0) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(rights), descriptors.begin(), descriptors.size() * sizeof(int));
  }
  return sendmsg(socket, &header, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof message);
}

Heard receive_message(int socket, ShmReceived* to) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMostDescriptors * sizeof(int))> control{};
  iovec part{&to->message, sizeof to->message};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t got = recvmsg(socket, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got < 0) return errno == EAGAIN || errno == EINTR ? Heard::nothing : Heard::end;
  for (Fd& descriptor : to->descriptors) descriptor = Fd();
  for (cmsghdr* rights = CMSG_FIRSTHDR(&header); rights; rights = CMSG_NXTHDR(&header, rights)) {
    if (rights->cmsg_level != SOL_SOCKET || rights->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(rights) + i * sizeof(int), sizeof fd);
      Fd owned(fd);
      if (i < to->descriptors.size()) to->descriptors[i] = std::move(owned);
    }
  }
  const bool whole = got == static_cast<ssize_t>(sizeof to->message) && !(header.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
  if (!whole) return Heard::end;
  if (to->message.magic != ShmMessage::kMagic || to->message.version != ShmMessage::kVersion) return Heard::end;
  return Heard::message;
}

}  // namespace harp
