// A handshake on a real socket: whatever it can take at a time, what follows, and a peer that goes.
#include "unit/credentials.h"
#include "net/handshake_connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <cerrno>
#include <string>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using Sent = HandshakeConnection::Sent;
using State = Handshake::State;

struct Ends {
  Ends() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds), 0);
    Hello hello;
    hello.from = 1, hello.to = 0;
    connector.emplace(Fd(fds[0]), Handshake::connector(kCredentials, hello));
    acceptor.emplace(Fd(fds[1]), Handshake::acceptor(kCredentials, 0));
  }
  // What one end has to say reaches the other.
  static std::optional<HandshakeConnection::Received> pass(HandshakeConnection& from, HandshakeConnection& to) {
    EXPECT_EQ(from.send(), Sent::all);
    return to.receive();
  }
  std::optional<HandshakeConnection> connector, acceptor;
};

TEST(HandshakeConnection, BothEndsProveThemselvesAndWhatFollowsIsGivenOn) {
  Ends ends;
  Ends::pass(*ends.connector, *ends.acceptor);
  Ends::pass(*ends.acceptor, *ends.connector);
  Ends::pass(*ends.connector, *ends.acceptor);
  ASSERT_EQ(ends.acceptor->handshake().state(), State::asked);
  EXPECT_EQ(ends.acceptor->handshake().hello().from, 1);
  ends.acceptor->handshake().welcome(7);
  EXPECT_EQ(ends.acceptor->send(), Sent::all);
  ASSERT_EQ(send(ends.acceptor->fd(), "more", 4, 0), 4);
  const auto received = ends.connector->receive();
  ASSERT_TRUE(received);
  EXPECT_EQ(received->error, 0);
  EXPECT_EQ(received->rest, "more");
  EXPECT_EQ(ends.connector->handshake().state(), State::done);
  EXPECT_EQ(ends.connector->handshake().peer_received(), 7u);
  EXPECT_TRUE(ends.connector->all_sent() && ends.acceptor->all_sent());
}

TEST(HandshakeConnection, NothingThatHasComeIsNoError) {
  Ends ends;
  EXPECT_EQ(ends.acceptor->receive(), std::nullopt);
  EXPECT_EQ(ends.acceptor->handshake().state(), State::going);
}

TEST(HandshakeConnection, WhatASocketDoesNotTakeIsSentLater) {
  Ends ends;
  const std::string filling(4096, 'x');
  size_t filled = 0;
  for (ssize_t n; (n = send(ends.connector->fd(), filling.data(), filling.size(), 0)) > 0;) filled += size_t(n);
  ASSERT_EQ(errno, EAGAIN);
  EXPECT_EQ(ends.connector->send(), Sent::later);
  EXPECT_FALSE(ends.connector->all_sent());
  std::string read(filled, 0);
  for (size_t at = 0; at < filled;) {
    const ssize_t n = recv(ends.acceptor->fd(), read.data() + at, filled - at, 0);
    ASSERT_GT(n, 0);
    at += size_t(n);
  }
  EXPECT_EQ(ends.connector->send(), Sent::all);
  EXPECT_EQ(ends.acceptor->receive()->error, 0);
  EXPECT_EQ(ends.acceptor->send(), Sent::all) << "it has understood and answers";
  EXPECT_EQ(ends.connector->receive()->error, 0);
}

TEST(HandshakeConnection, APeerThatIsGoneIsAnError) {
  Ends ends;
  ends.acceptor.reset();
  EXPECT_EQ(ends.connector->send(), Sent::broken);
  EXPECT_EQ(errno, EPIPE);
  EXPECT_EQ(ends.connector->receive()->error, ECONNRESET);
}

}  // namespace
}  // namespace lightcc
