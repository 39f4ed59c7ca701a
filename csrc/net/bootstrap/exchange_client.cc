#include "net/bootstrap/exchange_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "net/bootstrap/dial.h"

namespace lightcc {
namespace {

// Rank 0 gives up at its own deadline and tells who is missing; ours is a little later.
constexpr uint64_t kGraceNs = 4'000'000'000;
constexpr uint64_t kFailureNoticeNs = 5'000'000'000;  // for telling rank 0 that this rank cannot go on

bool ready(int fd, short events, uint64_t until_ns) {
  for (uint64_t now = now_ns(); now < until_ns; now = now_ns()) {
    pollfd one{fd, events, 0};
    const int n = poll(&one, 1, int(std::min<uint64_t>((until_ns - now) / 1'000'000 + 1, 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) throw system_error("init: waiting for rank 0");
  }
  return false;
}

}  // namespace

ExchangeClient::ExchangeClient(int rank, int size, const JobCredentials& credentials, std::vector<Endpoint> endpoints)
    : rank_(rank),
      size_(size),
      credentials_(credentials),
      endpoints_(std::move(endpoints)),
      opened_ns_(now_ns()),
      frames_((kMostNoteBytes + sizeof(uint32_t)) * size_t(size) + kMostNoteBytes) {}

std::vector<std::string> ExchangeClient::exchange(const std::string& mine, uint64_t deadline_ns) {
  if (mine.size() > kMostNoteBytes) throw Error(Code::internal, "a note for the other ranks is longer than 64 KiB");
  if (failure_) throw *failure_;
  try {
    if (!fd_) connect(deadline_ns);
    const uint64_t until = std::max(deadline_ns, now_ns()) + lag_ns_ + kGraceNs;
    // If rank 0 has hung up, it has said why.
    send_all(framed(FrameKind::note, WireWriter().put(round_).put(uint32_t(size_)).put(mine).take()), until);
    const Frame frame = next_frame(until);
    if (frame.kind == FrameKind::failure) throw failure_in(frame);
    WireReader reader(frame.body);
    if (frame.kind != FrameKind::all || reader.get<uint32_t>() != round_) WireReader::fail();
    const std::string root_from_elsewhere = reader.text();
    std::vector<std::string> notes(reader.length(sizeof(uint32_t)));
    for (std::string& note : notes) note = reader.text();
    if (int(notes.size()) != size_) WireReader::fail();
    // On rank 0's host: by which address others can reach it rank 0 knows only from them.
    if (own_.is_loopback() || own_.same_host(root_))
      own_ = root_from_elsewhere.empty() ? Address() : Address::parse(root_from_elsewhere);
    ++round_;
    return notes;
  } catch (const Error& error) {
    failure_ = error;
    fd_ = Fd();
    throw;
  }
}

void ExchangeClient::fail(const Error& error) {
  if (failure_) return;
  failure_ = error;
  try {
    const uint64_t until = now_ns() + kFailureNoticeNs;
    if (!fd_) connect(until);
    if (!send_all(failure_frame(error), until)) return;
    // Not closed before rank 0 has read it: it hangs up when it has told the others.
    char bytes[4096];
    while (ready(fd_.get(), POLLIN, until) && recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
    }
  } catch (const Error&) {  // rank 0 cannot be told; it will miss this rank
  }
  fd_ = Fd();
}

void ExchangeClient::connect(uint64_t deadline_ns) {
  Hello hello;
  hello.purpose = Purpose::bootstrap;
  hello.from = rank_;
  hello.to = 0;
  const std::string missing =
      "init: rank 0 did not come before " + start_timeout(deadline_ns - std::min(deadline_ns, opened_ns_));
  Dialed dialed = dial(endpoints_, credentials_, hello, missing, deadline_ns);
  fd_ = std::move(dialed.fd);
  frames_.feed(dialed.rest);
  root_ = peer_address(fd_.get());
  const Frame frame = next_frame(std::max(deadline_ns, now_ns()) + kGraceNs);
  if (frame.kind == FrameKind::failure) throw failure_in(frame);
  if (frame.kind != FrameKind::greeting) WireReader::fail();
  WireReader reader(frame.body);
  own_ = Address::parse(reader.text());
  const uint64_t rank0_ends = now_ns() + reader.get<uint64_t>();
  lag_ns_ = rank0_ends - std::min(rank0_ends, deadline_ns);
}

bool ExchangeClient::send_all(std::string_view bytes, uint64_t until_ns) {
  while (!bytes.empty() && ready(fd_.get(), POLLOUT, until_ns)) {
    const ssize_t n = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) return false;
    bytes.remove_prefix(size_t(n));
  }
  return bytes.empty();
}

Frame ExchangeClient::next_frame(uint64_t until_ns) {
  const std::string rank0 = "init: rank 0 at " + root_.text();
  for (;;) {
    if (auto frame = frames_.take()) return std::move(*frame);
    if (!ready(fd_.get(), POLLIN, until_ns))
      throw Error(Code::timeout,
                  rank0 + " did not answer before " + start_timeout(until_ns - opened_ns_ - kGraceNs) + "; stopped?");
    char bytes[64 << 10];
    const ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) throw Error(Code::peer_lost, rank0 + " left while the ranks met");
    frames_.feed({bytes, size_t(n)});
  }
}

}  // namespace lightcc
