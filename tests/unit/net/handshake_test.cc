// The handshake by script: both sides come to know each other, or each learns why not; and nobody else gets anywhere.
#include "unit/credentials.h"
#include "net/handshake.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "labels.h"

LABEL(alone);

namespace lightcc {
namespace {

using State = Handshake::State;

constexpr size_t kOpening = 80, kHello = 156, kProof = 32, kAnswer = 52, kWelcome = 44;  // bytes

Nonce nonce_of(uint8_t value) {
  Nonce nonce;
  nonce.fill(value);
  return nonce;
}

const Hello kHelloOf3{Purpose::link, 3, 1, 2, -1, 4711};

Handshake connector(const JobCredentials& credentials = kCredentials, uint8_t nonce = 1,
                    const Hello& hello = kHelloOf3) {
  return Handshake::connector(credentials, hello, nonce_of(nonce));
}
Handshake acceptor(const JobCredentials& credentials = kCredentials, uint8_t nonce = 2) {
  return Handshake::acceptor(credentials, 1, nonce_of(nonce));
}

size_t feed(Handshake& to, std::string_view bytes, size_t piece) {
  size_t used = 0;
  for (size_t at = 0; at < bytes.size(); at += piece) used += to.feed(bytes.substr(at, piece));
  return used;
}

// Carries bytes to and fro, `piece` at a time, until neither side has any more to say.
void carry(Handshake& connector, Handshake& acceptor, size_t piece = 10'000) {
  for (;;) {
    const std::string there = connector.take_output(), back = acceptor.take_output();
    if (there.empty() && back.empty()) return;
    feed(acceptor, there, piece);
    feed(connector, back, piece);
  }
}

// The four messages of an exchange that comes to its end.
struct Exchange {
  std::string hello, answer, proof, welcome;
};
Exchange exchange(uint8_t connectors_nonce = 1, uint8_t acceptors_nonce = 2) {
  Handshake c = connector(kCredentials, connectors_nonce), a = acceptor(kCredentials, acceptors_nonce);
  Exchange all;
  a.feed(all.hello = c.take_output());
  c.feed(all.answer = a.take_output());
  a.feed(all.proof = c.take_output());
  a.welcome(99);
  c.feed(all.welcome = a.take_output());
  EXPECT_EQ(c.state(), State::done);
  EXPECT_EQ(a.state(), State::done);
  return all;
}

std::string refused(const Handshake& handshake) { return handshake.error() ? handshake.error()->what() : "no error"; }
Code code_refused(const Handshake& handshake) { return handshake.error() ? handshake.error()->code() : Code::ok; }

TEST(Handshake, BothSidesAreDoneAndKnowWhatTheOtherSaid) {
  for (size_t piece : {1, 2, 7, 1000}) {
    Handshake c = connector(), a = acceptor();
    carry(c, a, piece);
    ASSERT_EQ(a.state(), State::asked) << piece;
    EXPECT_EQ(c.state(), State::going);
    EXPECT_EQ(a.hello().purpose, Purpose::link);
    EXPECT_EQ(a.hello().from, 3);
    EXPECT_EQ(a.hello().to, 1);
    EXPECT_EQ(a.hello().group, 2);
    EXPECT_EQ(a.hello().lane, -1);
    EXPECT_EQ(a.hello().received, 4711u);
    a.welcome(uint64_t(1) << 40);
    carry(c, a, piece);
    EXPECT_EQ(a.state(), State::done);
    EXPECT_EQ(c.state(), State::done);
    EXPECT_EQ(c.peer_received(), uint64_t(1) << 40);
    EXPECT_FALSE(a.error() || c.error());
  }
}

TEST(Handshake, MessagesHaveTheSizesThatTheOtherTestsCountOn) {
  const Exchange all = exchange();
  EXPECT_EQ(all.hello.size(), kHello);
  EXPECT_EQ(all.answer.size(), kAnswer);
  EXPECT_EQ(all.proof.size(), kProof);
  EXPECT_EQ(all.welcome.size(), kWelcome);
}

TEST(Handshake, EachPurposeArrives) {
  for (Purpose purpose : {Purpose::bootstrap, Purpose::link, Purpose::probe}) {
    Handshake c = connector(kCredentials, 1, {purpose, 0, 1, 0, 0, 0}), a = acceptor();
    carry(c, a);
    ASSERT_EQ(a.state(), State::asked);
    EXPECT_EQ(a.hello().purpose, purpose);
  }
}

TEST(Handshake, WhatFollowsItIsLeftAlone) {
  const Exchange all = exchange();
  Handshake c = connector(), a = acceptor();
  EXPECT_EQ(a.feed(all.hello + all.proof + "more"), kHello + kProof);
  EXPECT_EQ(a.feed("more"), 0u);  // before the welcome
  a.welcome(99);
  EXPECT_EQ(a.feed("more"), 0u);
  EXPECT_EQ(c.feed(all.answer + all.welcome + "more"), kAnswer + kWelcome);
  EXPECT_EQ(c.state(), State::done);
  EXPECT_EQ(c.feed("more"), 0u);
  EXPECT_EQ(feed(c = connector(), all.answer + all.welcome + "more", 1), kAnswer + kWelcome);
}

TEST(Handshake, EveryTruncationIsWaitedOn) {
  const Exchange all = exchange();
  const std::string there = all.hello + all.proof, back = all.answer + all.welcome;
  for (size_t n = 0; n < there.size(); ++n) {
    Handshake a = acceptor();
    EXPECT_EQ(a.feed(there.substr(0, n)), n);
    EXPECT_EQ(a.state(), State::going) << n;
  }
  for (size_t n = 0; n < back.size(); ++n) {
    Handshake c = connector();
    EXPECT_EQ(c.feed(back.substr(0, n)), n);
    EXPECT_EQ(c.state(), State::going) << n;
  }
}

struct Refusal {
  JobCredentials connector, acceptor;
  int to;
  Code code;
  std::string text;
};
std::vector<Refusal> refusals() {
  JobCredentials version = kCredentials, job = kCredentials, older = kCredentials, oldest = kCredentials,
                 secret = kCredentials;
  version.version = "0.2.0.dev1", job.job = "job-8", older.epoch = 3, oldest.epoch = 0;
  job.epoch = 9;  // the first difference counts: job, then epoch
  return {{version, kCredentials, 1, Code::invalid_argument,
           "rank 3 runs lightcc 0.2.0.dev1, rank 1 0.2.0: install the same version on all hosts"},
          {job, kCredentials, 1, Code::mismatch,
           "rank 3 belongs to another job than rank 1, which it reached: do two jobs use the same address and port?"},
          {older, kCredentials, 1, Code::shut_down,
           "rank 3 has been initialised 4 times, rank 1 5 times: all ranks must call init() equally often"},
          {kCredentials, oldest, 1, Code::timeout,
           "rank 3 has been initialised 5 times, rank 1 once: all ranks must call init() equally often"},
          {kCredentials, kCredentials, 6, Code::internal, "rank 3 looked for rank 6 and reached rank 1"}};
}

TEST(Handshake, RefusalsSayOnBothSidesWhatDiffers) {
  for (const Refusal& row : refusals())
    for (size_t piece : {1, 1000}) {
      Hello hello = kHelloOf3;
      hello.to = row.to;
      Handshake c = connector(row.connector, 1, hello), a = acceptor(row.acceptor);
      carry(c, a, piece);
      EXPECT_EQ(c.state(), State::refused) << row.text;
      EXPECT_EQ(a.state(), State::refused) << row.text;
      EXPECT_EQ(refused(c), row.text);
      EXPECT_EQ(refused(a), row.text);
      EXPECT_EQ(code_refused(c), row.code);
      EXPECT_EQ(code_refused(a), row.code);
    }
}

TEST(Handshake, WhatIsToldBeforeTheProofDoesNotDependOnTheSecret) {
  for (const Refusal& row : refusals()) {
    if (row.to != 1) continue;  // that is told to none but those who know the secret
    JobCredentials other = row.acceptor;
    other.secret = "another secret";
    Handshake a = acceptor(row.acceptor), b = acceptor(other);
    const std::string hello = connector(row.connector).take_output();
    a.feed(hello);
    b.feed(hello);
    const std::string told = a.take_output();
    EXPECT_FALSE(told.empty());
    EXPECT_EQ(told, b.take_output());
  }
}

TEST(Handshake, AnyTwoVersionsUnderstandTheOpening) {
  JobCredentials credentials = kCredentials;
  credentials.version = "7";
  const std::string opening = connector(credentials).take_output().substr(0, kOpening);
  Handshake a = acceptor();
  a.feed(opening + "whatever version 7 says here");
  EXPECT_EQ(a.state(), State::refused);
  EXPECT_EQ(refused(a), "rank 3 runs lightcc 7, rank 1 0.2.0: install the same version on all hosts");
}

TEST(Handshake, BuildsOfOneVersionThatSpeakDifferentlyAreRefused) {
  std::string hello = exchange().hello;
  hello[8] ^= 2;  // the protocol, behind the magic
  Handshake a = acceptor();
  a.feed(hello);
  EXPECT_EQ(code_refused(a), Code::invalid_argument);
  EXPECT_EQ(refused(a), "rank 3 and rank 1 run different builds of lightcc 0.2.0: install the same one on all hosts");
}

TEST(Handshake, AJobsNameMayBeOfAnyLength) {
  JobCredentials credentials = kCredentials, other = kCredentials;
  credentials.job.assign(100'000, 'j');
  other.job.assign(100'001, 'j');
  Handshake c = connector(credentials), a = acceptor(credentials), b = acceptor(other);
  EXPECT_EQ(b.feed(connector(credentials).take_output()), kHello);
  EXPECT_EQ(code_refused(b), Code::mismatch);
  carry(c, a);
  EXPECT_EQ(a.state(), State::asked);
}

TEST(Handshake, AnAcceptorWithAnotherSecretIsFoundOutAndGetsNoProof) {
  JobCredentials other = kCredentials;
  other.secret = "another secret";
  Handshake c = connector(), a = acceptor(other);
  carry(c, a);
  EXPECT_EQ(c.state(), State::refused);
  EXPECT_EQ(code_refused(c), Code::internal);
  EXPECT_EQ(refused(c), "the process at the other end does not know this job's secret (LIGHTCC_SECRET)");
  EXPECT_EQ(a.state(), State::going);  // it has got the Hello and nothing else
}

TEST(Handshake, WhoIsLeftOfAnEarlierJobOfTheSameNameAndSecretIsUnauthenticated) {
  JobCredentials earlier = kCredentials;
  earlier.nonce = nonce_of(9);
  Handshake left = connector(earlier), a = acceptor();
  const std::string hello = left.take_output(), answer = (a.feed(hello), a.take_output());
  left.feed(answer);
  EXPECT_EQ(left.state(), State::refused);
  Handshake forger = connector(), b = acceptor(earlier);  // it takes what it hears for its own job's
  carry(forger, b);
  EXPECT_EQ(forger.state(), State::refused);
  EXPECT_NE(b.state(), State::asked);
}

TEST(Handshake, AConnectorWithAnotherSecretIsUnauthenticatedAndToldNothing) {
  const Exchange all = exchange();
  Handshake a = acceptor();
  a.feed(all.hello);
  EXPECT_EQ(a.take_output(), all.answer);
  EXPECT_EQ(a.feed(std::string(kProof, 'x') + "more"), kProof);
  EXPECT_EQ(a.state(), State::unauthenticated);
  EXPECT_EQ(a.take_output(), "");
  EXPECT_EQ(a.feed(all.proof), 0u);  // too late
  EXPECT_EQ(a.state(), State::unauthenticated);
}

TEST(Handshake, AnotherProtocolIsUnauthenticated) {
  for (const char* text : {"GET / HTTP/1.1\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n", "LIGHTCC\n"}) {
    Handshake a = acceptor(), c = connector();
    EXPECT_EQ(a.feed(text), 8u) << text;
    EXPECT_EQ(a.state(), State::unauthenticated) << text;
    EXPECT_EQ(a.take_output(), "") << text;
    c.feed(text);
    EXPECT_EQ(c.state(), State::unauthenticated) << text;
    EXPECT_EQ(c.take_output(), "") << text;
    EXPECT_EQ(refused(c), "the process at the other end does not speak as lightcc does");
  }
}

// Whoever changes one bit of one message keeps both sides apart.
TEST(Handshake, EveryBitCounts) {
  for (int message = 0; message < 4; ++message) {
    const Exchange all = exchange();
    const size_t size = message == 0 ? kHello : message == 1 ? kAnswer : message == 2 ? kProof : kWelcome;
    for (size_t bit = 0; bit < size * 8; ++bit) {
      Handshake c = connector(), a = acceptor();
      const auto changed = [&](int number, std::string bytes) {
        if (number == message && bytes.size() == size) bytes[bit / 8] ^= char(1 << bit % 8);
        return bytes;
      };
      a.feed(changed(0, c.take_output()));
      c.feed(changed(1, a.take_output()));
      a.feed(changed(2, c.take_output()));
      EXPECT_EQ(a.state() == State::asked, message == 3) << "message " << message << " bit " << bit;
      if (a.state() == State::asked) a.welcome(99);
      c.feed(changed(3, a.take_output()));
      EXPECT_NE(c.state(), State::done) << "message " << message << " bit " << bit;
    }
  }
}

TEST(Handshake, ReplaysAreWorthNothing) {
  const Exchange all = exchange(1, 2);
  Handshake same = acceptor(kCredentials, 2), fresh = acceptor(kCredentials, 5);
  same.feed(all.hello + all.proof);
  EXPECT_EQ(same.state(), State::asked);  // the nonce alone makes the difference
  fresh.feed(all.hello + all.proof);
  EXPECT_EQ(fresh.state(), State::unauthenticated);

  Handshake same_connector = connector(kCredentials, 1), fresh_connector = connector(kCredentials, 5);
  same_connector.feed(all.answer + all.welcome);
  EXPECT_EQ(same_connector.state(), State::done);
  fresh_connector.feed(all.answer + all.welcome);
  EXPECT_EQ(fresh_connector.state(), State::refused);
}

TEST(Handshake, EachMessageHasItsTurn) {
  const Exchange all = exchange();
  Handshake c = connector(), early = connector();
  c.feed(all.answer);
  EXPECT_EQ(c.take_output(), all.hello + all.proof);
  c.feed(all.answer);  // again
  EXPECT_EQ(c.state(), State::unauthenticated);
  EXPECT_EQ(c.take_output(), "");
  early.feed(all.welcome);
  EXPECT_EQ(early.state(), State::unauthenticated);
}

TEST(Handshake, AProofOfAnotherEpochIsWorthNothing) {
  const Exchange all = exchange();
  JobCredentials next = kCredentials;
  next.epoch = 5;
  std::string hello = connector(next).take_output();
  Handshake a = acceptor(next);
  a.feed(hello + all.proof);
  EXPECT_EQ(a.state(), State::unauthenticated);
}

TEST(Handshake, ReflectionsAreWorthNothing) {
  Handshake c = connector();
  c.feed(c.take_output());
  EXPECT_EQ(c.state(), State::unauthenticated);
  EXPECT_EQ(c.take_output(), "");

  // What an acceptor proves itself with is no proof of a connector.
  const Exchange all = exchange();
  for (const std::string& message : {all.answer, all.welcome}) {
    Handshake a = acceptor();
    a.feed(all.hello + message.substr(message.size() - kProof));
    EXPECT_EQ(a.state(), State::unauthenticated);
  }
  // Nor is a connector's proof one of an acceptor, in either of its messages.
  c = connector();
  c.feed(all.answer.substr(0, kAnswer - kProof) + all.proof);
  EXPECT_EQ(c.state(), State::refused);
  c = connector();
  c.feed(all.answer + all.welcome.substr(0, kWelcome - kProof) + all.proof);
  EXPECT_EQ(c.state(), State::refused);
  EXPECT_EQ(c.peer_received(), 0u);
}

TEST(Handshake, TwoAtATimeKeepApart) {
  Handshake c1 = connector(kCredentials, 1), a1 = acceptor(kCredentials, 2), c2 = connector(kCredentials, 3),
            a2 = acceptor(kCredentials, 4);
  a1.feed(c1.take_output());
  a2.feed(c2.take_output());
  c2.feed(a2.take_output());
  c1.feed(a1.take_output());
  a1.feed(c1.take_output());
  a2.feed(c2.take_output());
  ASSERT_EQ(a1.state(), State::asked);
  ASSERT_EQ(a2.state(), State::asked);
  a2.welcome(2);
  a1.welcome(1);
  c1.feed(a1.take_output());
  c2.feed(a2.take_output());
  EXPECT_EQ(c1.peer_received(), 1u);
  EXPECT_EQ(c2.peer_received(), 2u);

  c1 = connector(kCredentials, 1), a1 = acceptor(kCredentials, 2), c2 = connector(kCredentials, 3),
  a2 = acceptor(kCredentials, 4);
  a1.feed(c1.take_output());
  a2.feed(c2.take_output());
  c1.feed(a2.take_output());  // crossed
  EXPECT_EQ(c1.state(), State::refused);
  c2 = connector(kCredentials, 3), a2 = acceptor(kCredentials, 4);
  a2.feed(c2.take_output());
  c2.feed(a2.take_output());
  a1.feed(c2.take_output());
  EXPECT_EQ(a1.state(), State::unauthenticated);
}

TEST(Handshake, TheAcceptorMayRefuseWhomItCouldWelcome) {
  Handshake c = connector(), a = acceptor();
  carry(c, a);
  ASSERT_EQ(a.state(), State::asked);
  a.refuse(Error(Code::peer_lost, "rank 2 died"));
  EXPECT_EQ(a.state(), State::refused);
  carry(c, a);
  EXPECT_EQ(c.state(), State::refused);
  EXPECT_EQ(code_refused(c), Code::peer_lost);
  EXPECT_EQ(refused(c), "rank 2 died");
  EXPECT_THROW(a.welcome(0), Error);
}

TEST(Handshake, TheAcceptorMayRefuseAtAnyTimeButTellsNobodyWhoSaidNoHello) {
  const Exchange all = exchange();
  const Error error(Code::shut_down, "shut down");
  for (size_t said = 0; said < kHello + kProof; ++said) {
    Handshake a = acceptor(), c = connector();
    a.feed((all.hello + all.proof).substr(0, said));
    a.refuse(error);
    a.refuse(Error(Code::internal, "again"));
    EXPECT_EQ(a.state(), State::refused);
    EXPECT_EQ(refused(a), "shut down");
    const std::string told = a.take_output();
    EXPECT_EQ(told.empty(), said < 8) << said;
    c.feed(told);
    EXPECT_EQ(c.state(), said < 8 ? State::going : State::refused) << said;
  }
  Handshake done = acceptor(), unauthenticated = acceptor();
  done.feed(all.hello + all.proof);
  done.welcome(0);
  done.refuse(error);
  EXPECT_EQ(done.state(), State::done);
  unauthenticated.feed("no Hello");
  unauthenticated.refuse(error);
  EXPECT_EQ(unauthenticated.state(), State::unauthenticated);
  EXPECT_EQ(unauthenticated.take_output(), "");
}

// What a connector makes of a refusal with this text.
std::string after_refusal(const std::string& text) {
  Handshake c = connector(), a = acceptor();
  a.feed(c.take_output());
  a.take_output();
  a.refuse(Error(Code::mismatch, text));
  c.feed(a.take_output());
  return refused(c);
}

TEST(Handshake, AReasonIsCutAndMadeFitToBePrinted) {
  EXPECT_EQ(after_refusal(""), "");
  EXPECT_EQ(after_refusal(std::string(1000, 'x')), std::string(1000, 'x'));
  EXPECT_EQ(after_refusal(std::string(1001, 'x')), std::string(1000, 'x'));
  EXPECT_EQ(after_refusal(std::string(999, 'x') + "\u20ac"), std::string(999, 'x'));  // no half of a character
  EXPECT_EQ(after_refusal(std::string(997, 'x') + "\u20ac!"), std::string(997, 'x') + "\u20ac");
  EXPECT_EQ(after_refusal("two\nlines \x1b[2J\x7f"), "two\nlines ?[2J?");
}

TEST(Handshake, MalformedRefusalsAreUnauthenticated) {
  const Error error(Code::mismatch, "why");
  Handshake a = acceptor();
  a.feed(exchange().hello);
  a.take_output();
  a.refuse(error);
  const std::string good = a.take_output();  // tag, code, length, text
  const auto end = [&](size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    Handshake c = connector();
    c.feed(bytes);
    return c.state();
  };
  EXPECT_EQ(end(4, char(Code::mismatch)), State::refused);
  for (char code : {0, 1, 8, -1}) EXPECT_EQ(end(4, code), State::unauthenticated) << int(code);
  EXPECT_EQ(end(9, 4), State::unauthenticated);  // more than a thousand bytes
}

TEST(Handshake, ValuesOutOfRangeAreUnauthenticated) {
  for (Hello hello : {Hello{Purpose(3), 3, 1, 0, 0, 0}, Hello{Purpose(-1), 3, 1, 0, 0, 0},
                      Hello{Purpose::link, -1, 1, 0, 0, 0}, Hello{Purpose::link, 3, -1, 0, 0, 0},
                      Hello{Purpose::link, 3, 1, -1, 0, 0}, Hello{Purpose::link, 3, 1, 0, -2, 0}}) {
    Handshake a = acceptor();
    a.feed(connector(kCredentials, 1, hello).take_output());
    EXPECT_EQ(a.state(), State::unauthenticated);
    EXPECT_EQ(a.take_output(), "");
  }
}

TEST(Handshake, ThereIsNoneWithoutASecret) {
  JobCredentials credentials = kCredentials;
  credentials.secret = "";
  EXPECT_THROW(connector(credentials), Error);
  EXPECT_THROW(acceptor(credentials), Error);
  credentials = kCredentials, credentials.version.assign(64, '1');
  EXPECT_NO_THROW(connector(credentials));
  credentials.version += '1';
  EXPECT_THROW(connector(credentials), Error);
  EXPECT_THROW(acceptor(credentials), Error);
  EXPECT_THROW(acceptor().welcome(0), Error);
}

TEST(Handshake, NoncesAreDrawn) {
  EXPECT_NE(draw_nonce(), draw_nonce());
  EXPECT_NE(Handshake::connector(kCredentials, kHelloOf3).take_output(),
            Handshake::connector(kCredentials, kHelloOf3).take_output());
}

}  // namespace
}  // namespace lightcc
