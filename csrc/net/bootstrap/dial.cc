#include "net/bootstrap/dial.h"

#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/shortage.h"
#include "net/handshake_connection.h"

namespace lightcc {
namespace {

constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kStaggerNs = 5 * kMs;      // between the first attempts, so that earlier endpoints win
constexpr uint64_t kFirstRetryNs = 20 * kMs;  // doubled with every failure
constexpr uint64_t kLastRetryNs = 500 * kMs;
constexpr uint64_t kSilenceNs = 10'000 * kMs;  // of an endpoint that has accepted the connection
constexpr uint64_t kResolveNs = 2'000 * kMs;   // names are looked up again so often
constexpr uint64_t kLookNs = 100 * kMs;        // at the clock
constexpr size_t kMostEndpointsNamed = 4;

struct Attempt {
  std::string endpoint;  // as it was given, for messages
  Address address;
  uint64_t retry_ns = kFirstRetryNs, next_ns = 0, silent_since_ns = 0;
  std::optional<HandshakeConnection> connection;
  bool connected = false;
  std::string problem;   // of the last try
  std::string answer;    // of a process there that is not rank 0 of this job: says more than a later problem
};

class Dialer {
 public:
  Dialer(const std::vector<Endpoint>& endpoints, const JobCredentials& credentials, const Hello& hello)
      : endpoints_(endpoints), credentials_(credentials), hello_(hello) {}

  std::optional<Dialed> run(const Deadline& deadline) {
    while (!deadline.over()) {
      const uint64_t now = now_ns();
      if (now >= resolve_ns_) resolve(now);
      uint64_t wake = std::min(deadline.ns, resolve_ns_);
      std::vector<pollfd> polled;
      std::vector<Attempt*> of;
      for (Attempt& a : attempts_) {
        if (!a.connection && now >= a.next_ns) start(a, now);
        if (a.connection && now - a.silent_since_ns > kSilenceNs)
          stop(a, a.connected ? "no answer" : "cannot be reached");
        if (!a.connection) {
          wake = std::min(wake, a.next_ns);
          continue;
        }
        const bool sends = !a.connected || !a.connection->all_sent();
        polled.push_back({a.connection->fd(), short(sends ? POLLIN | POLLOUT : POLLIN), 0});
        of.push_back(&a);
      }
      const int ready = poll_until(polled, deadline.at(wake), kLookNs);
      if (ready < 0 && errno != EINTR) throw system_error("init: looking for rank 0");
      for (size_t i = 0; ready > 0 && i < polled.size(); ++i) {
        if (!polled[i].revents) continue;
        if (auto found = go_on(*of[i])) return found;
      }
    }
    return {};
  }

  Error failure(const std::string& missing) const {
    if (refusal_) return *refusal_;
    std::vector<const Attempt*> attempts;
    for (const Attempt& a : attempts_) attempts.push_back(&a);
    std::stable_partition(attempts.begin(), attempts.end(), [](const Attempt* a) { return !a->answer.empty(); });
    std::string text = missing;
    for (size_t i = 0; i < std::min(attempts.size(), kMostEndpointsNamed); ++i)
      text += (i == 0 ? "; tried " : ", ") + attempts[i]->endpoint + " (" + outcome(*attempts[i]) + ")";
    if (attempts_.size() > kMostEndpointsNamed)
      text += " and " + std::to_string(attempts_.size() - kMostEndpointsNamed) + " more";
    if (!unknown_.empty()) text += "; no address is known for " + unknown_;
    return Error(Code::timeout, text);
  }

 private:
  static std::string outcome(const Attempt& a) {
    if (!a.answer.empty()) return a.answer;
    if (!a.problem.empty()) return a.problem;
    return a.connected ? "no answer" : "cannot be reached";
  }

  // Adds addresses that are new. Resolving may block for as long as the resolver takes.
  void resolve(uint64_t now) {
    unknown_.clear();
    std::vector<Attempt> found;
    for (const Endpoint& endpoint : endpoints_) {
      auto addresses = Address::resolve(endpoint.host, endpoint.port);
      if (addresses.empty() && unknown_.find(endpoint.host) == std::string::npos)
        unknown_ += (unknown_.empty() ? "" : ", ") + endpoint.host;
      for (const Address& address : addresses) {
        auto same = [&](const Attempt& a) { return a.address.text() == address.text(); };
        if (std::any_of(attempts_.begin(), attempts_.end(), same)) continue;
        Attempt& a = attempts_.emplace_back();
        a.address = address;
        a.endpoint = address.text();
        a.next_ns = now + kStaggerNs * (attempts_.size() - 1);
        if (endpoint.host != address.with_port(0).text()) a.endpoint += " [" + endpoint.host + "]";
      }
    }
    resolve_ns_ = now_ns() + kResolveNs;
  }

  void start(Attempt& a, uint64_t now) {
    Fd fd(socket(a.address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    a.connected = false;
    a.silent_since_ns = now;
    if (!fd) return stop(a, reason_of(errno));
    if (const int error = connect_from(fd, a.address, Address())) return stop(a, std::strerror(error));
    a.connection.emplace(std::move(fd), Handshake::connector(credentials_, hello_));
  }

  void stop(Attempt& a, const std::string& problem) {
    a.connection.reset();
    a.problem = problem;
    a.next_ns = now_ns() + a.retry_ns;
    a.retry_ns = std::min(a.retry_ns * 2, kLastRetryNs);
  }

  // Returns the connection if it is the one.
  std::optional<Dialed> go_on(Attempt& a) {
    if (!a.connected && !is_connected(a)) return {};
    HandshakeConnection& connection = *a.connection;
    if (connection.send() == HandshakeConnection::Sent::broken) return stop(a, std::strerror(errno)), std::nullopt;
    auto received = connection.receive();
    if (!received) return {};
    if (received->error == ECONNRESET) return stop(a, "hung up before it had proven itself"), std::nullopt;
    if (received->error) return stop(a, std::strerror(received->error)), std::nullopt;
    a.silent_since_ns = now_ns();
    switch (connection.handshake().state()) {
      case Handshake::State::done:
        return Dialed{connection.take_fd(), std::move(received->rest)};
      case Handshake::State::going:
      case Handshake::State::asked:
        if (connection.send() == HandshakeConnection::Sent::broken) stop(a, std::strerror(errno));
        return {};
      case Handshake::State::refused:
      case Handshake::State::unauthenticated: {
        const Error error = *connection.handshake().error();
        // An endpoint may be another job's by chance, and rank 0 may be about to begin the epoch that we are in.
        if (connection.handshake().state() == Handshake::State::refused && error.code() != Code::mismatch)
          refusal_ = Error(error.code(), "init: at " + a.endpoint + ": " + error.what());
        a.answer = error.what();
        return stop(a, a.answer), std::nullopt;
      }
    }
    return {};
  }

  // False: not yet, or it has been stopped.
  bool is_connected(Attempt& a) {
    const int fd = a.connection->fd();
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error) return stop(a, std::strerror(error)), false;
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return false;
    // A port of this host's range of own ports may connect to itself.
    if (local_address(fd).text() == a.address.text()) return stop(a, "connected to itself"), false;
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    a.connected = true;
    a.silent_since_ns = now_ns();
    return true;
  }

  const std::vector<Endpoint>& endpoints_;
  const JobCredentials& credentials_;
  const Hello& hello_;
  std::vector<Attempt> attempts_;
  uint64_t resolve_ns_ = 0;
  std::string unknown_;
  std::optional<Error> refusal_;
};

}  // namespace

Dialed dial(const std::vector<Endpoint>& endpoints, const JobCredentials& credentials, const Hello& hello,
            const std::string& missing, const Deadline& deadline) {
  Dialer dialer(endpoints, credentials, hello);
  if (auto found = dialer.run(deadline)) return std::move(*found);
  throw deadline.error(dialer.failure(missing));
}

}  // namespace lightcc
