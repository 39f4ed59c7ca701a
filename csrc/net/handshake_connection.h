// A connection on which a handshake is made (handshake.h): its socket, and what the handshake still has to send.
// Whoever polls the socket calls send() while it can be written to and receive() while it can be read. Nothing here
// blocks.
#pragma once
#include <optional>
#include <string>

#include "base/fd.h"
#include "net/handshake.h"

namespace lightcc {

class HandshakeConnection {
 public:
  // socket: of an incoming connection, or of one that is being made: then send() may begin once it is connected.
  HandshakeConnection(Fd socket, Handshake handshake) : fd_(std::move(socket)), handshake_(std::move(handshake)) {}

  int fd() const { return fd_.get(); }
  Fd take_fd() { return std::move(fd_); }
  Handshake& handshake() { return handshake_; }
  const Handshake& handshake() const { return handshake_; }

  enum class Sent { all, later, broken };  // later: the socket takes no more now. broken: errno says why
  Sent send();                             // what the handshake has said
  bool all_sent() const { return output_.empty(); }

  struct Received {
    int error = 0;                         // not 0: the connection is over, ECONNRESET if the other end hung up
    std::string rest{};                    // what came behind the handshake
  };
  std::optional<Received> receive();       // nothing has come: nullopt. Reads once; send() is to follow

 private:
  Fd fd_;
  Handshake handshake_;
  std::string output_;                     // taken from the handshake, not sent yet
};

}  // namespace lightcc
