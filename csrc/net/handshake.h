// What happens first on every connection, as a state machine without I/O: bytes in, bytes out.
//   connector -> acceptor   Hello: magic, protocol, version of lightcc, job, epoch, who wants whom and for what, nonce
//   acceptor  -> connector  Answer: nonce and HMAC(secret, "acceptor", epoch's nonce, hello, nonce); or a refusal with
//                           its reason
//   connector -> acceptor   Proof: HMAC(secret, "connector", epoch's nonce, hello, answer)
//   acceptor  -> connector  Welcome: HMAC(secret, "welcome", ...) and how much was received on the broken connection
//                           that this one replaces; or a refusal
// Neither side acts on anything before the other has shown that it knows the secret, and no value of either proof can
// be had from the other role (RFC 2104; as SCRAM's roles, RFC 5802). A connector that sends no Hello is unauthenticated
// and told nothing. Whoever knows job and epoch can have an Answer and try guesses against it at leisure: the secret
// must be random.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/hmac.h"

namespace lightcc {

using Nonce = std::array<uint8_t, 16>;
Nonce draw_nonce();

struct JobCredentials {     // what all processes of one epoch of a job have in common
  std::string job, version, secret;
  int32_t epoch = 0;        // counts the inits of a process, from 0
  // Drawn by rank 0 for this very epoch and distributed by the BootstrapExchange, on whose own connections it is still
  // zero. Without it a process left of an earlier job of the same name and secret would pass for one of this job.
  Nonce nonce{};
};

enum class Purpose : int32_t { bootstrap, link, probe };  // probe: "are you alive?"; it ends with Welcome
inline constexpr int kPurposes = 3;

struct Hello {
  Purpose purpose = Purpose::link;
  int32_t from = 0, to = 0;          // world ranks
  int32_t group = 0, lane = 0;       // of a link; lane -1 is control
  uint64_t received = 0;             // on the broken connection that this one replaces
};

class Handshake {
 public:
  // Both throw Error{internal} if there is no secret or the version is longer than 64 bytes.
  static Handshake connector(JobCredentials, const Hello&, const Nonce& = draw_nonce());
  static Handshake acceptor(JobCredentials, int rank, const Nonce& = draw_nonce());

  enum class State {
    going,     // more bytes must come (or take_output() must go out)
    asked,     // acceptor: the connector has proven itself; look at hello(), then welcome() or refuse()
    done,      // both have proven themselves; what follows on the connection is not the handshake's
    refused,   // error() says why: by the other side, or by us after sending the reason
    unauthenticated  // speaks another protocol or does not know the secret: close, say nothing, count
  };
  State state() const { return state_; }
  // Takes what came; returns how many bytes of it were the handshake's. The rest is not looked at.
  size_t feed(std::string_view);
  // To be sent, before anything else happens with the connection. After a refusal: then shut down the sending side and
  // read on until the other closes, for a while; closing with unread bytes resets the connection, reason and all.
  std::string take_output();
  const Hello& hello() const { return hello_; }    // acceptor: from state asked on
  uint64_t peer_received() const { return peer_received_; }  // connector: from state done on
  void welcome(uint64_t received);                 // acceptor, in state asked
  // Acceptor, in any state but done; the text is cut at 1000 bytes. Whoever has said no Hello yet is told nothing.
  void refuse(const Error&);
  // Set in states refused and unauthenticated; the caller adds the address. The acceptor itself refuses, in words that
  // fit both sides: invalid_argument, another version; mismatch, another job; shut_down, the connector's epoch is an
  // older one; timeout, it is a newer one, so the acceptor is not there yet; internal, the connector wanted another
  // rank. For the connector, internal is also: the acceptor has another secret.
  const std::optional<Error>& error() const { return error_; }

 private:
  using Step = void (Handshake::*)(std::string_view);
  Handshake(JobCredentials, int rank, const Nonce&);
  void await(size_t bytes, Step);                  // `step` gets exactly so many
  void end(State, const Error&);
  Digest proof(std::string_view role, std::string_view more = {}) const;
  // Acceptor: each takes one piece of what the connector sends.
  void take_magic(std::string_view);
  void take_opening(std::string_view);
  void take_hello(std::string_view);
  void take_proof(std::string_view);
  // Connector.
  void take_tag(std::string_view);
  void take_answer(std::string_view);
  void take_welcome(std::string_view);
  void take_refusal(std::string_view);
  void take_reason(std::string_view);

  JobCredentials credentials_;
  int rank_;
  Nonce nonce_;
  State state_ = State::going;
  Hello hello_;
  uint64_t peer_received_ = 0;
  std::optional<Error> error_;
  std::string said_hello_, said_answer_;           // the messages as they travelled
  std::string input_, output_;
  size_t need_ = 0;
  Step step_ = nullptr;
  Code reason_ = Code::ok;
};

}  // namespace lightcc
