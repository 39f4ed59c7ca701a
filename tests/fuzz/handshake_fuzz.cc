// Bytes of anyone against both roles of the handshake: nobody gets through with other bytes than those that hold
// the proof, and the pieces in which bytes come make no difference. An input is: flags, size of the pieces, how many
// bytes of a genuine exchange come first; then bytes that follow those, or that change the genuine ones (flag kChange).
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "net/handshake.h"

namespace {

using lightcc::Handshake;
using State = Handshake::State;

constexpr uint8_t kConnector = 1, kChange = 2;

Handshake fresh(bool connector) {
  static const lightcc::JobCredentials credentials{"job", "1.0", "secret", 2};
  static const lightcc::Hello hello{lightcc::Purpose::link, 1, 0, 3, -1, 5};
  return connector ? Handshake::connector(credentials, hello, {1}) : Handshake::acceptor(credentials, 0, {2});
}

void expect(bool holds) {
  if (!holds) std::abort();
}

struct Genuine {
  std::string to_acceptor, to_connector;
  Genuine() {
    Handshake connector = fresh(true), acceptor = fresh(false);
    const auto carry = [](Handshake& from, Handshake& to, std::string& all) {
      const std::string bytes = from.take_output();
      expect(to.feed(bytes) == bytes.size());
      all += bytes;
    };
    carry(connector, acceptor, to_acceptor);
    carry(acceptor, connector, to_connector);
    carry(connector, acceptor, to_acceptor);
    acceptor.welcome(6);
    carry(acceptor, connector, to_connector);
    expect(connector.state() == State::done && acceptor.state() == State::done);
  }
};

struct End {
  State state;
  size_t used = 0;
  std::string said, error;
};

End run(bool connector, const std::string& bytes, size_t piece) {
  Handshake handshake = fresh(connector);
  End end{};
  for (size_t at = 0; at < bytes.size(); at += piece) {
    end.used += handshake.feed(std::string_view(bytes).substr(at, piece));
    end.said += handshake.take_output();
  }
  end.state = handshake.state();
  if (handshake.error()) end.error = handshake.error()->what();
  expect((end.state == State::refused || end.state == State::unauthenticated) == handshake.error().has_value());
  return end;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Genuine genuine;
  if (size < 3) return 0;
  const bool connector = data[0] & kConnector;
  const std::string& right = connector ? genuine.to_connector : genuine.to_acceptor;
  const std::string rest(reinterpret_cast<const char*>(data + 3), size - 3);
  std::string bytes = right;
  if (data[0] & kChange) {
    bytes.resize(std::max(bytes.size(), rest.size()));
    for (size_t i = 0; i < rest.size(); ++i) bytes[i] ^= rest[i];
  } else {
    bytes = right.substr(0, data[2]) + rest;
  }
  const End at_once = run(connector, bytes, bytes.size() + 1);
  const End in_pieces = run(connector, bytes, size_t(data[1]) + 1);
  // The output is cleared on State::unauthenticated, so what was said before it depends on when it was taken.
  expect(at_once.state == in_pieces.state && at_once.used == in_pieces.used && at_once.error == in_pieces.error);
  expect(at_once.state == State::unauthenticated || at_once.said == in_pieces.said);
  expect(at_once.used <= bytes.size());
  expect(at_once.state != State::going || at_once.used == bytes.size());
  const bool through = at_once.state == (connector ? State::done : State::asked);
  expect(through == bytes.starts_with(right));
  return 0;
}
