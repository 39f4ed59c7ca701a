#include "net/bootstrap/exchange_client.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "net/bootstrap/dial.h"

namespace lightcc {
namespace {

bool ready(int fd, short events, const Deadline& deadline) {
  return wait_for(fd, events, deadline, "init: waiting for rank 0");
}

}  // namespace

ExchangeClient::ExchangeClient(int rank, int size, const JobCredentials& credentials, std::vector<Endpoint> endpoints)
    : rank_(rank),
      size_(size),
      credentials_(credentials),
      endpoints_(std::move(endpoints)),
      opened_ns_(now_ns()),
      frames_((kMostNoteBytes + sizeof(uint32_t)) * size_t(size) + kMostNoteBytes) {}

std::vector<std::string> ExchangeClient::exchange(const std::string& mine, const Deadline& deadline) {
  if (mine.size() > kMostNoteBytes) throw Error(Code::internal, "a note for the other ranks is longer than 64 KiB");
  if (failure_) throw *failure_;
  try {
    if (!fd_) connect(deadline);
    const Deadline until = deadline.at(std::max(deadline.ns, now_ns()) + lag_ns_ + kClientGraceNs);
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
    if (fd_ && deadline.cancelled()) send_all(failure_frame(error), deadline);  // else rank 0 knows, or is gone
    fd_ = Fd();
    throw;
  }
}

void ExchangeClient::fail(const Error& error, const Cancellation* cancellation) {
  if (failure_) return;
  failure_ = error;
  try {
    const Deadline until(now_ns() + kClientFailureNoticeNs, cancellation);
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

void ExchangeClient::connect(const Deadline& deadline) {
  Hello hello;
  hello.purpose = Purpose::bootstrap;
  hello.from = rank_;
  hello.to = 0;
  const std::string missing =
      "init: rank 0 did not come before " + start_timeout(deadline.ns - std::min(deadline.ns, opened_ns_));
  Dialed dialed = dial(endpoints_, credentials_, hello, missing, deadline);
  fd_ = std::move(dialed.fd);
  frames_.feed(dialed.rest);
  root_ = peer_address(fd_.get());
  const Frame frame = next_frame(deadline.at(std::max(deadline.ns, now_ns()) + kClientGraceNs));
  if (frame.kind == FrameKind::failure) throw failure_in(frame);
  if (frame.kind != FrameKind::greeting) WireReader::fail();
  WireReader reader(frame.body);
  own_ = Address::parse(reader.text());
  const uint64_t rank0_ends = now_ns() + reader.get<uint64_t>();
  lag_ns_ = rank0_ends - std::min(rank0_ends, deadline.ns);
}

bool ExchangeClient::send_all(std::string_view bytes, const Deadline& until) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) bytes.remove_prefix(size_t(n));
    else if (errno == EAGAIN ? !ready(fd_.get(), POLLOUT, until) : errno != EINTR) return false;
  }
  return true;
}

Frame ExchangeClient::next_frame(const Deadline& until) {
  const std::string rank0 = "init: rank 0 at " + root_.text();
  for (;;) {
    if (auto frame = frames_.take()) return std::move(*frame);
    if (!ready(fd_.get(), POLLIN, until))
      throw until.error(Error(Code::timeout, rank0 + " did not answer before " +
                                                 start_timeout(until.ns - opened_ns_ - kClientGraceNs) + "; stopped?"));
    char bytes[64 << 10];
    const ssize_t n = recv(fd_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) throw Error(Code::peer_lost, rank0 + " left while the ranks met");
    frames_.feed({bytes, size_t(n)});
  }
}

}  // namespace lightcc
