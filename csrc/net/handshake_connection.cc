#include "net/handshake_connection.h"

#include <sys/socket.h>

#include <cerrno>

namespace lightcc {
namespace {

constexpr size_t kReadBytes = 4096;

bool is_for_later(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

HandshakeConnection::Sent HandshakeConnection::send() {
  output_ += handshake_.take_output();
  while (!output_.empty()) {
    const ssize_t n = ::send(fd_.get(), output_.data(), output_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return is_for_later(errno) ? Sent::later : Sent::broken;
    output_.erase(0, size_t(n));
  }
  return Sent::all;
}

std::optional<HandshakeConnection::Received> HandshakeConnection::receive() {
  char bytes[kReadBytes];
  ssize_t n = 0;
  do n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0 && is_for_later(errno)) return std::nullopt;
  if (n <= 0) return Received{n < 0 ? errno : ECONNRESET};
  const size_t used = handshake_.feed({bytes, size_t(n)});
  return Received{0, std::string(bytes + used, size_t(n) - used)};
}

}  // namespace lightcc
