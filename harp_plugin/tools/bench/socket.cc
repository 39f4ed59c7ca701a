#include "harp_plugin/tools/bench/socket.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

namespace harp::bench {
namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;

constexpr double kConnectS = 10, kAnswerS = 120;
constexpr uint32_t kLongestText = 1 << 20;

sockaddr_in parse_address(const std::string& where) {
  const size_t colon = where.rfind(':');
  const std::string address = colon == std::string::npos ? "0.0.0.0" : where.substr(0, colon);
  sockaddr_in parsed{};
  parsed.sin_family = AF_INET;
  const std::string port = where.substr(colon == std::string::npos ? 0 : colon + 1);
  parsed.sin_port = htons(uint16_t(std::strtoul(port.c_str(), nullptr, 10)));
  if (inet_pton(AF_INET, address.c_str(), &parsed.sin_addr) != 1)
    throw Error(Code::invalid_argument, "not ADDRESS:PORT of IPv4: " + where);
  return parsed;
}

Fd stream_socket() {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) throw lightcc::system_error("make a socket");
  return socket;
}

}  // namespace

Fd listen_at(const std::string& where) {
  const sockaddr_in address = parse_address(where);
  Fd listener = stream_socket();
  const int yes = 1;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener.get(), SOMAXCONN) != 0)
    throw lightcc::system_error("listen at " + where);
  return listener;
}

Fd connect_to(const std::string& where) {
  const sockaddr_in address = parse_address(where);
  const uint64_t deadline = lightcc::now_ns() + uint64_t(kConnectS * 1e9);
  for (;;) {
    Fd socket = stream_socket();
    if (connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return socket;
    if (lightcc::now_ns() > deadline) throw lightcc::system_error("connect to " + where);
    usleep(10'000);
  }
}

Fd accept_from(int listener) {
  Fd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.get() < 0) throw lightcc::system_error("accept");
  return socket;
}

std::string own_address(int socket) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw lightcc::system_error("ask for a socket's address");
  char text[INET_ADDRSTRLEN];
  inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
  return std::string(text) + ":" + std::to_string(ntohs(address.sin_port));
}

std::string address_of(const std::string& where) { return where.substr(0, where.rfind(':')); }

void Control::send(const std::string& text) {
  const uint32_t length = uint32_t(text.size());
  std::string bytes(reinterpret_cast<const char*>(&length), sizeof length);
  bytes += text;
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t n = ::send(socket_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (n < 0) throw lightcc::system_error("send on the control connection");
    sent += size_t(n);
  }
}

std::string Control::receive(const std::function<void()>& meanwhile) {
  uint32_t length;
  read(reinterpret_cast<char*>(&length), sizeof length, meanwhile);
  if (length > kLongestText) throw Error(Code::mismatch, "the other side of the control connection is no harp-bench");
  std::string text(length, '\0');
  read(text.data(), length, meanwhile);
  return text;
}

void Control::read(char* to, size_t bytes, const std::function<void()>& meanwhile) {
  const uint64_t deadline = lightcc::now_ns() + uint64_t(kAnswerS * 1e9);
  for (size_t have = 0; have < bytes;) {
    if (meanwhile) meanwhile();
    pollfd ready{socket_.get(), POLLIN, 0};
    if (poll(&ready, 1, meanwhile ? 0 : 1000) == 0) {
      if (lightcc::now_ns() > deadline) throw Error(Code::timeout, "no answer on the control connection");
      continue;
    }
    const ssize_t n = recv(socket_.get(), to + have, bytes - have, 0);
    if (n < 0) throw lightcc::system_error("receive on the control connection");
    if (n == 0) throw Error(Code::peer_lost, "the other side has ended; what it printed says why");
    have += size_t(n);
  }
}

}  // namespace harp::bench
