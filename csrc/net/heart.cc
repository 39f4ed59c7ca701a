#include "net/heart.h"

#include <sys/socket.h>

#include <cstring>
#include <numeric>

#include "base/clock.h"

namespace lightcc {
namespace {

// A datagram socket for both families speaks to IPv4 by mapped addresses (RFC 4291, 2.5.5.2).
Address mapped(const Address& address) {
  sockaddr_in v4;
  std::memcpy(&v4, address.get(), sizeof v4);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6, v6.sin6_port = v4.sin_port;
  v6.sin6_addr.s6_addr[10] = v6.sin6_addr.s6_addr[11] = 0xff;
  std::memcpy(v6.sin6_addr.s6_addr + 12, &v4.sin_addr, sizeof v4.sin_addr);
  return Address(reinterpret_cast<sockaddr*>(&v6), sizeof v6);
}

}  // namespace

Heart::Heart(const Terms& terms, int rank, const Topology& topology, std::vector<Address> addresses, Fd socket,
             Host& host)
    : key_(beat_key(terms)), topology_(topology), rank_(rank), own_host_(topology.host_of[size_t(rank)]),
      addresses_(std::move(addresses)), socket_(std::move(socket)), family_(local_address(socket_.get()).family()),
      host_(host), pulse_(int(topology.hosts.size()), own_host_, now_ns()) {}

Beat Heart::beat(uint64_t now) const {
  Beat beat{.host = own_host_, .sequence = now, .awake_ages = {}, .over = over_, .code = code_, .cause = cause_};
  for (int i = 0; i < host_.size(); ++i) {
    const uint64_t awake = host_.header(i).awake_ns.load(std::memory_order_relaxed);
    beat.awake_ages.push_back(awake == 0 ? kUnknownAge : age_of(now - std::min(now, awake)));
  }
  return beat;
}

void Heart::send_to(const Address& to, const std::string& bytes) {
  const Address& address = family_ == AF_INET6 && to.family() == AF_INET ? mapped(to) : to;
  // What cannot be sent now is a lost datagram; others follow.
  [[maybe_unused]] ssize_t n =
      sendto(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT, address.get(), address.length());
}

void Heart::send(const std::vector<int>& hosts, uint64_t now) {
  const std::string bytes = encode(beat(now), key_);
  for (int host : hosts)
    for (int rank : topology_.hosts[size_t(host)]) send_to(addresses_[size_t(rank)], bytes);
}

void Heart::tick(uint64_t now) {
  std::vector<int> lost, unheard;
  std::vector<Beat> ends;
  {
    std::lock_guard lock(mutex_);
    auto& last_beat = host_.header(0).beat_ns;
    if (beat_is_due(now, last_beat.load(std::memory_order_relaxed), topology_.local[size_t(rank_)])) {
      last_beat.store(now, std::memory_order_relaxed);
      send(listeners_of(own_host_, int(topology_.hosts.size())), now);
    }
    char buffer[kBeatBytes + 1];
    for (ssize_t n; (n = recv(socket_.get(), buffer, sizeof buffer, MSG_DONTWAIT)) >= 0;) {
      auto beat = parse_beat({buffer, size_t(n)}, key_);
      if (!beat) strangers_.fetch_add(1, std::memory_order_relaxed);
      else if (pulse_.heard(*beat, now) && beat->over && beat->code != Code::ok) ends.push_back(std::move(*beat));
    }
    lost = pulse_.lost(now), unheard = pulse_.never_heard(now);
  }
  for (const Beat& end : ends) news_.over(end.code, end.cause);
  for (int host : lost) news_.lost(host);
  for (int host : unheard) news_.unheard(host);
}

void Heart::tell(Code code, const std::string& cause, uint64_t now, bool they_know) {
  std::lock_guard lock(mutex_);
  if (std::exchange(over_, true)) return;
  code_ = code, cause_ = cause;
  if (they_know) return;
  std::vector<int> others(topology_.hosts.size());
  std::iota(others.begin(), others.end(), 0);
  others.erase(others.begin() + own_host_);
  send(others, now);
}

std::optional<uint64_t> Heart::awake_ns_ago(int rank, uint64_t now) const {
  std::lock_guard lock(mutex_);
  return pulse_.awake_ns_ago(topology_.host_of[size_t(rank)], topology_.local[size_t(rank)], now);
}

bool Heart::heard_since(int rank, uint64_t then) const {
  std::lock_guard lock(mutex_);
  return pulse_.heard_since(topology_.host_of[size_t(rank)], then);
}

bool Heart::all_heard() const {
  std::lock_guard lock(mutex_);
  return pulse_.all_heard();
}

}  // namespace lightcc
