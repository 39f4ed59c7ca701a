#include "net/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "base/wire.h"

namespace lightcc {
namespace {

// The opening of a Hello and the form of a refusal stay as they are in every version, so that any two versions can tell
// each other that they differ.
constexpr uint64_t kMagic = 0x0a6363746867696c;  // "lightcc\n" on the wire
constexpr uint32_t kProtocol = 2;
constexpr size_t kVersionBytes = 64;
constexpr size_t kOpeningBytes = sizeof kMagic + sizeof kProtocol + sizeof(int32_t) + kVersionBytes;
enum class HandshakeTag : uint32_t { answer = 0x72736e61, refusal = 0x65756672, welcome = 0x636c6577 };
constexpr size_t kReasonHeadBytes = sizeof(Code) + sizeof(uint32_t);
constexpr size_t kReasonBytes = 1000;

constexpr size_t kHelloBytes = kOpeningBytes + sizeof(Digest) + 5 * sizeof(int32_t) + sizeof(uint64_t) + sizeof(Nonce);
constexpr size_t kAnswerBytes = sizeof(Nonce) + sizeof(Digest);  // behind the tag, as the next
constexpr size_t kWelcomeBytes = sizeof(uint64_t) + sizeof(Digest);

std::string_view view(const auto& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::string times(int64_t n) { return n == 1 ? "once" : std::to_string(n) + " times"; }

Error no_lightcc() { return Error(Code::internal, "the process at the other end does not speak as lightcc does"); }
Error no_secret() {
  return Error(Code::internal, "the process at the other end does not know this job's secret (LIGHTCC_SECRET)");
}

std::string opening(const JobCredentials& credentials, int32_t from) {
  std::array<uint8_t, kVersionBytes> version{};
  std::copy(credentials.version.begin(), credentials.version.end(), version.begin());
  return WireWriter().put(kMagic).put(kProtocol).put(from).put(version).take();
}

}  // namespace

Nonce draw_nonce() {
  Nonce nonce;
  if (getrandom(nonce.data(), nonce.size(), 0) != ssize_t(nonce.size())) throw system_error("drawing a nonce");
  return nonce;
}

Handshake::Handshake(JobCredentials credentials, int rank, const Nonce& nonce)
    : credentials_(std::move(credentials)), rank_(rank), nonce_(nonce) {
  if (credentials_.secret.empty())
    throw Error(Code::internal, "a connection needs the job's secret, and there is none");
  if (credentials_.version.size() > kVersionBytes)
    throw Error(Code::internal, "the version '" + credentials_.version + "' is too long to be sent");
}

Handshake Handshake::connector(JobCredentials credentials, const Hello& hello, const Nonce& nonce) {
  Handshake h(std::move(credentials), hello.from, nonce);
  h.hello_ = hello;
  WireWriter rest;
  rest.put(sha256(h.credentials_.job))
      .put(h.credentials_.epoch)
      .put(hello.purpose)
      .put(hello.to)
      .put(hello.group)
      .put(hello.lane);
  h.said_hello_ = opening(h.credentials_, hello.from) + rest.put(hello.received).put(nonce).take();
  h.output_ = h.said_hello_;
  h.await(sizeof(HandshakeTag), &Handshake::take_tag);
  return h;
}

Handshake Handshake::acceptor(JobCredentials credentials, int rank, const Nonce& nonce) {
  Handshake h(std::move(credentials), rank, nonce);
  h.await(sizeof kMagic, &Handshake::take_magic);
  return h;
}

void Handshake::await(size_t bytes, Step step) { need_ = bytes, step_ = step; }

void Handshake::end(State state, const Error& error) {
  state_ = state;
  error_ = error;
  if (state == State::unauthenticated) output_.clear();
}

size_t Handshake::feed(std::string_view bytes) {
  size_t used = 0;
  while (state_ == State::going) {
    const size_t n = std::min(need_ - input_.size(), bytes.size() - used);
    input_.append(bytes.substr(used, n));
    used += n;
    if (input_.size() < need_) break;
    const std::string piece = std::exchange(input_, {});
    try {
      (this->*step_)(piece);
    } catch (const Error&) {  // WireReader's: a value out of its range
      end(State::unauthenticated, no_lightcc());
    }
  }
  return used;
}

std::string Handshake::take_output() { return std::exchange(output_, {}); }

// What `role` shows to know the secret, for all that was said before and `more`.
Digest Handshake::proof(std::string_view role, std::string_view more) const {
  WireWriter said;
  said.put(role).put(credentials_.nonce).put(said_hello_).put(said_answer_).put(more);
  return hmac_sha256(credentials_.secret, said.take());
}

void Handshake::take_magic(std::string_view bytes) {
  if (WireReader(bytes).get<uint64_t>() != kMagic) return end(State::unauthenticated, no_lightcc());
  said_hello_ = bytes;
  await(kOpeningBytes - sizeof kMagic, &Handshake::take_opening);
}

void Handshake::take_opening(std::string_view bytes) {
  WireReader reader(bytes);
  const auto protocol = reader.get<uint32_t>();
  hello_.from = reader.get<int32_t>();
  said_hello_ += bytes;
  const auto version = reader.bytes<kVersionBytes>();
  const std::string theirs(view(version).substr(0, view(version).find('\0')));
  const std::string them = rank_text(hello_.from), us = rank_text(rank_);
  if (theirs != credentials_.version)
    return refuse(Error(Code::invalid_argument, them + " runs lightcc " + printable(theirs) + ", " + us + " " +
                                                    credentials_.version + ": install the same version on all hosts"));
  if (protocol != kProtocol)
    return refuse(Error(Code::invalid_argument, them + " and " + us + " run different builds of lightcc " + theirs +
                                                    ": install the same one on all hosts"));
  await(kHelloBytes - kOpeningBytes, &Handshake::take_hello);
}

void Handshake::take_hello(std::string_view bytes) {
  WireReader reader(bytes);
  const Digest job = reader.bytes<sizeof(Digest)>();
  const auto epoch = reader.get<int32_t>();
  hello_.purpose = reader.get_enum<Purpose>(kPurposes);
  hello_.to = reader.get<int32_t>();
  hello_.group = reader.get<int32_t>();
  hello_.lane = reader.get<int32_t>();
  hello_.received = reader.get<uint64_t>();
  if (hello_.from < 0 || hello_.to < 0 || hello_.group < 0 || hello_.lane < -1 || epoch < 0) WireReader::fail();
  said_hello_ += bytes;
  const std::string them = rank_text(hello_.from), us = rank_text(rank_);
  if (job != sha256(credentials_.job))
    return refuse(Error(Code::mismatch, them + " belongs to another job than " + us +
                                            ", which it reached: do two jobs use the same address and port?"));
  if (epoch != credentials_.epoch)
    return refuse(Error(epoch < credentials_.epoch ? Code::shut_down : Code::timeout,
                        them + " has been initialised " + times(int64_t(epoch) + 1) + ", " + us + " " +
                            times(int64_t(credentials_.epoch) + 1) + ": all ranks must call init() equally often"));
  said_answer_ = WireWriter().put(nonce_).take();
  said_answer_ += view(proof("acceptor"));
  output_ = WireWriter().put(HandshakeTag::answer).take() + said_answer_;
  await(sizeof(Digest), &Handshake::take_proof);
}

void Handshake::take_proof(std::string_view bytes) {
  if (!equal(WireReader(bytes).bytes<sizeof(Digest)>(), proof("connector")))
    return end(State::unauthenticated, no_secret());
  state_ = State::asked;
  if (hello_.to != rank_)
    refuse(Error(Code::internal,
                 rank_text(hello_.from) + " looked for " + rank_text(hello_.to) + " and reached " + rank_text(rank_)));
}

void Handshake::welcome(uint64_t received) {
  if (state_ != State::asked) throw Error(Code::internal, "only a rank that has proven itself is welcome");
  const std::string body = WireWriter().put(received).take();
  output_ += WireWriter().put(HandshakeTag::welcome).put(received).put(proof("welcome", body)).take();
  state_ = State::done;
}

void Handshake::refuse(const Error& error) {
  if (state_ != State::going && state_ != State::asked) return;
  const std::string text(truncate_utf8(error.what(), kReasonBytes));
  if (!said_hello_.empty()) output_ += WireWriter().put(HandshakeTag::refusal).put(error.code()).put(text).take();
  end(State::refused, error);
}

void Handshake::take_tag(std::string_view bytes) {
  const HandshakeTag tag = WireReader(bytes).get<HandshakeTag>();
  if (tag == HandshakeTag::refusal) return await(kReasonHeadBytes, &Handshake::take_refusal);
  if (tag == HandshakeTag::answer && said_answer_.empty()) return await(kAnswerBytes, &Handshake::take_answer);
  if (tag == HandshakeTag::welcome && !said_answer_.empty()) return await(kWelcomeBytes, &Handshake::take_welcome);
  end(State::unauthenticated, no_lightcc());
}

void Handshake::take_answer(std::string_view bytes) {
  WireReader reader(bytes);
  said_answer_ = WireWriter().put(reader.bytes<sizeof(Nonce)>()).take();
  if (!equal(reader.bytes<sizeof(Digest)>(), proof("acceptor"))) return end(State::refused, no_secret());
  said_answer_ = bytes;
  output_ += view(proof("connector"));
  await(sizeof(HandshakeTag), &Handshake::take_tag);
}

void Handshake::take_welcome(std::string_view bytes) {
  WireReader reader(bytes);
  const auto received = reader.get<uint64_t>();
  if (!equal(reader.bytes<sizeof(Digest)>(), proof("welcome", bytes.substr(0, sizeof received))))
    return end(State::refused, no_secret());
  peer_received_ = received;
  state_ = State::done;
}

void Handshake::take_refusal(std::string_view bytes) {
  WireReader reader(bytes);
  reason_ = reader.get_enum<Code>(int(Code::internal) + 1);
  const auto length = reader.get<uint32_t>();
  if (reason_ < Code::invalid_argument || length > kReasonBytes) WireReader::fail();
  await(length, &Handshake::take_reason);
}

void Handshake::take_reason(std::string_view text) { end(State::refused, Error(reason_, printable(text))); }

}  // namespace lightcc
