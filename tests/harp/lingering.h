// A descriptor whose close waits: a TCP socket with bytes that its peer does not read, and SO_LINGER.
#pragma once
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <vector>

#include "base/fd.h"
#include "harp_plugin/port/descriptors.h"

namespace harp {

class Lingering {
 public:
  static constexpr int kSeconds = 60;
  static constexpr std::chrono::seconds kNotWaited{kSeconds / 2};

  Lingering() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const lightcc::Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in ip{};
    ip.sin_family = AF_INET;
    ip.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof ip;
    auto* const name = reinterpret_cast<sockaddr*>(&ip);
    EXPECT_EQ(bind(listener.get(), name, length), 0);
    EXPECT_EQ(listen(listener.get(), 1), 0);
    EXPECT_EQ(getsockname(listener.get(), name, &length), 0);
    EXPECT_EQ(connect(socket_.get(), name, length), 0);
    peer_ = lightcc::Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const std::vector<char> bytes(1 << 20);
    while (send(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
    }
    const linger waits{1, kSeconds};
    EXPECT_EQ(setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &waits, sizeof waits), 0);
  }
  // Whoever closes it last waits: the one at the other end of this socket.
  void pass(int over, const void* message, size_t bytes) { EXPECT_TRUE(try_to_pass(over, message, bytes)); }
  bool try_to_pass(int over, const void* message, size_t bytes) {
    const int fd = socket_.get();
    if (!send_with_descriptors(over, message, bytes, std::span(&fd, 1))) return false;
    socket_ = lightcc::Fd();
    return true;
  }

 private:
  lightcc::Fd socket_, peer_;
};

}  // namespace harp
