#include "harp_plugin/port/shm_socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>

#include "base/close_elsewhere.h"

namespace harp {

using lightcc::Fd;
using lightcc::system_error;

namespace {

constexpr int kBacklog = 512;

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

// None, if its other end is another user's: nothing is received from them, and they may have passed descriptors.
Fd if_same_user(Fd socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid()) return socket;
  lightcc::close_elsewhere(std::move(socket));
  return Fd();
}

bool is_socket(const Fd& fd) {
  struct stat status;
  return fd && fstat(fd.get(), &status) == 0 && S_ISSOCK(status.st_mode);
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
  if (!socket || connect(socket.get(), name.get(), name.bytes) != 0) return Fd();
  return if_same_user(std::move(socket));
}

Fd accept_from(int listener, bool* more) {
  Fd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  *more = static_cast<bool>(socket);
  return socket ? if_same_user(std::move(socket)) : Fd();
}

bool send_message(int socket, const ShmMessage& message, std::initializer_list<int> descriptors) {
  return send_with_descriptors(socket, &message, sizeof message, descriptors);
}

Heard receive_message(int socket, ShmReceived* to) {
  std::vector<Fd> descriptors;
  const Heard heard = receive_with_descriptors(socket, &to->message, sizeof to->message, &descriptors);
  if (heard != Heard::message) return heard;
  const bool ours = to->message.magic == ShmMessage::kMagic && to->message.version == ShmMessage::kVersion &&
                    descriptors.size() <= to->descriptors.size() &&
                    std::none_of(descriptors.begin(), descriptors.end(), is_socket);
  if (!ours) {
    lightcc::close_elsewhere(std::move(descriptors));
    return Heard::end;
  }
  descriptors.resize(to->descriptors.size());
  std::move(descriptors.begin(), descriptors.end(), to->descriptors.begin());
  return Heard::message;
}

}  // namespace harp
