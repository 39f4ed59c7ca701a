#include "net/health/heartbeat_socket.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <cstring>
#include <numeric>

#include "base/clock.h"
#include "base/log.h"
#include "base/shortage.h"

namespace lightcc {
namespace {

// A datagram socket for both families speaks to IPv4 by mapped addresses (RFC 4291, 2.5.5.2).
Address mapped(const Address& address) {
  sockaddr_in v4;
  std::memcpy(&v4, address.get(), sizeof v4);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = v4.sin_port;
  v6.sin6_addr.s6_addr[10] = v6.sin6_addr.s6_addr[11] = 0xff;
  std::memcpy(v6.sin6_addr.s6_addr + 12, &v4.sin_addr, sizeof v4.sin_addr);
  return Address(reinterpret_cast<sockaddr*>(&v6), sizeof v6);
}

constexpr int kBufferBytes = 4 << 20;  // asked for; the system may give less
constexpr int kMostATick = 16 << 10;   // datagrams that are read: all that the buffer holds, so that none is heard late

// Has the kernel drop every datagram that does not begin with `head`, so that those of strangers take no room in the
// socket's buffer, however many they are. A classic BPF program, which needs no privilege.
void admit_only(int socket, std::string_view head) {
  constexpr uint32_t kUdpHeaderBytes = 8;  // what a UDP socket's filter sees begins with it
  std::vector<sock_filter> program;
  const size_t last = head.size() / 4 * 2 + 1;
  for (uint32_t at = 0; at < head.size(); at += 4) {
    uint32_t word;
    std::memcpy(&word, head.data() + at, sizeof word);
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kUdpHeaderBytes + at));
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ntohl(word), 0, uint8_t(last - program.size() - 1)));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, UINT32_MAX));
  program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) != 0)
    log(Level::warning, "the system takes no filter for heartbeats (" + reason_of(errno) +
                            "): many datagrams of strangers could hide them, and a host be taken for lost");
}

}  // namespace

HeartbeatSocket::HeartbeatSocket(const JobCredentials& credentials, int rank, const Topology& topology,
                                 std::vector<Address> addresses, Fd socket, LocalRanks& local_ranks,
                                 std::unique_ptr<HostProbes> probes)
    : key_(heartbeat_key(credentials)),
      topology_(topology),
      rank_(rank),
      own_host_(topology.host_of[size_t(rank)]),
      addresses_(std::move(addresses)),
      socket_(std::move(socket)),
      family_(local_address(socket_.get()).family()),
      local_ranks_(local_ranks),
      probes_(std::move(probes)),
      asked_(topology.hosts.size()),
      detector_(int(topology.hosts.size()), own_host_, now_ns()) {
  setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &kBufferBytes, sizeof kBufferBytes);
  admit_only(socket_.get(), heartbeat_head(key_));
}

Heartbeat HeartbeatSocket::next_heartbeat(uint64_t now) {
  const uint64_t sequence = local_ranks_.header(0).heartbeats_sent.fetch_add(1, std::memory_order_relaxed) + 1;
  Heartbeat heartbeat{
      .host = own_host_, .sequence = sequence, .awake_ages = {}, .over = over_, .code = code_, .cause = cause_};
  for (int i = 0; i < local_ranks_.size(); ++i) {
    const uint64_t awake = local_ranks_.header(i).awake_ns.load(std::memory_order_relaxed);
    heartbeat.awake_ages.push_back(awake == 0 ? kUnknownAge : age_of(now - std::min(now, awake)));
  }
  return heartbeat;
}

void HeartbeatSocket::send_to(const Address& to, const std::string& bytes) {
  const Address& address = family_ == AF_INET6 && to.family() == AF_INET ? mapped(to) : to;
  // What cannot be sent now is a lost datagram; others follow.
  [[maybe_unused]] ssize_t n =
      sendto(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT, address.get(), address.length());
}

void HeartbeatSocket::send(const std::vector<int>& hosts, uint64_t now) {
  const std::string bytes = encode(next_heartbeat(now), key_);
  for (int host : hosts)
    for (int rank : topology_.hosts[size_t(host)]) send_to(addresses_[size_t(rank)], bytes);
}

void HeartbeatSocket::receive(uint64_t now, std::vector<Heartbeat>& ends) {
  char buffer[kHeartbeatBytes + 1];
  for (int i = 0; i < kMostATick; ++i) {
    const ssize_t n = recv(socket_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (n < 0) return;
    auto heartbeat = parse_heartbeat({buffer, size_t(n)}, key_);
    if (!heartbeat) unauthenticated_.fetch_add(1, std::memory_order_relaxed);
    else if (detector_.heard(*heartbeat, now) && heartbeat->over && heartbeat->code != Code::ok)
      ends.push_back(std::move(*heartbeat));
  }
}

// Another of its ranks each time, since some may be stopped; each rank here begins with another one.
void HeartbeatSocket::ask(int host, uint64_t now) {
  const std::vector<int>& ranks = topology_.hosts[size_t(host)];
  const size_t turn = size_t(topology_.local[size_t(rank_)]) + asked_[size_t(host)]++;
  probes_->ask(ranks[turn % ranks.size()], now);
}

void HeartbeatSocket::take_answers(uint64_t now) {
  if (!probes_) return;
  std::lock_guard lock(mutex_);
  for (int rank : probes_->step(now)) detector_.answered(topology_.host_of[size_t(rank)], now);
}

void HeartbeatSocket::tick(uint64_t now) {
  take_answers(now);
  std::vector<int> lost, spared, unheard;
  std::vector<Heartbeat> ends;
  {
    std::lock_guard lock(mutex_);
    auto& last_heartbeat = local_ranks_.header(0).heartbeat_ns;
    if (heartbeat_is_due(now, last_heartbeat.load(std::memory_order_relaxed), topology_.local[size_t(rank_)])) {
      last_heartbeat.store(now, std::memory_order_relaxed);
      send(receivers_of(own_host_, int(topology_.hosts.size())), now);
    }
    receive(now, ends);
    lost = detector_.lost(now);
    spared = detector_.spared(now);
    for (int host : detector_.doubtful(now))
      if (probes_ && !over_) ask(host, now);
    unheard = detector_.never_heard(now);
  }
  for (const Heartbeat& end : ends) callbacks_.over(end.code, end.cause);
  for (int host : lost) callbacks_.lost(host);
  for (int host : spared) callbacks_.spared(host);
  for (int host : unheard) callbacks_.unheard(host);
}

void HeartbeatSocket::announce_end(Code code, const std::string& cause, uint64_t now, bool already_known) {
  std::lock_guard lock(mutex_);
  if (std::exchange(over_, true)) return;
  code_ = code;
  cause_ = cause;
  if (already_known) return;
  std::vector<int> others(topology_.hosts.size());
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + own_host_);
  send(others, now);
}

std::optional<uint64_t> HeartbeatSocket::awake_ns_ago(int rank, uint64_t now) const {
  std::lock_guard lock(mutex_);
  return detector_.awake_ns_ago(topology_.host_of[size_t(rank)], topology_.local[size_t(rank)], now);
}

bool HeartbeatSocket::heard_since(int rank, uint64_t then) const {
  std::lock_guard lock(mutex_);
  return detector_.heard_since(topology_.host_of[size_t(rank)], then);
}

bool HeartbeatSocket::all_heard() const {
  std::lock_guard lock(mutex_);
  return detector_.all_heard();
}

}  // namespace lightcc
