#include "net/peers.h"

#include <poll.h>

#include <algorithm>
#include <array>

#include "base/clock.h"

namespace lightcc {

Peers::Peers(std::unique_ptr<LocalRanks> local_ranks)
    : local_ranks_(std::move(local_ranks)),
      topology_(Topology::one_host(local_ranks_->size())),
      rank_(local_ranks_->rank()) {
  for (int rank = 0; rank < local_ranks_->size(); ++rank) names_.push_back(local_ranks_->name(rank));
}

Peers::Peers(int rank, Topology topology, const std::vector<Contact>& contacts,
             std::unique_ptr<LocalRanks> local_ranks, std::vector<NamedTransport> transports,
             std::unique_ptr<HeartbeatSocket> heartbeats)
    : local_ranks_(std::move(local_ranks)),
      topology_(std::move(topology)),
      rank_(rank),
      transports_(std::move(transports)),
      route_(contacts.size()),
      heartbeats_(std::move(heartbeats)) {
  if (transports_.size() > kMostTransports) throw Error(Code::internal, "more transports than can be polled");
  for (size_t peer = 0; peer < contacts.size(); ++peer) {
    names_.push_back(contacts[peer].name);
    if (is_local(int(peer))) continue;
    const auto leads_there = [&](const NamedTransport& one) {
      return !one.only_watches && contacts[peer].address(one.name) != nullptr;
    };
    const auto found = std::find_if(transports_.begin(), transports_.end(), leads_there);
    if (found == transports_.end())
      throw Error(Code::internal, "no transport leads to " + contacts[peer].name + ": no address of it is known");
    route_[peer] = found->transport.get();
  }
}

std::optional<uint64_t> Peers::awake_ns_ago(int rank, uint64_t now) const {
  if (!is_local(rank)) return heartbeats_ ? heartbeats_->awake_ns_ago(rank, now) : std::nullopt;
  const uint64_t awake = header(rank).awake_ns.load(std::memory_order_relaxed);
  return now - std::min(now, awake);
}

// ---- links

std::unique_ptr<Link> Peers::control_link(int group, int peer) {
  if (is_local(peer)) return local_ranks_->control_link(group, local_index(peer));
  return route(peer).link(serial(group), Transport::kControl, peer);
}

std::unique_ptr<Link> Peers::data_link(int group, int lane, int peer) {
  if (is_local(peer)) return local_ranks_->data_link(group, lane, local_index(peer));
  return route(peer).link(serial(group), lane, peer);
}

std::unique_ptr<Link> Peers::point_to_point_link(int group, int peer) {
  return is_local(peer) ? data_link(group, LocalRanks::kPointToPointLane, peer)
                        : data_link(group, Transport::kPointToPoint, peer);
}

void Peers::reset_group(int group) {
  local_ranks_->reset_group(group);
  for (auto& [name, transport, only_watches] : transports_) transport->retire(serial(group));
  ++generation_[size_t(group)];
}

bool Peers::step() {
  bool moved = false;
  for (const NamedTransport& one : transports_)
    if (!one.only_watches || is_time_to_watch()) moved |= one.transport->step();
  return moved;
}

bool Peers::is_time_to_watch() {
  const uint64_t now = now_ns();
  if (now - watched_ns_ < kWatchNs) return false;
  watched_ns_ = now;
  return true;
}

void Peers::probe(int peer) {
  for (const NamedTransport& one : transports_)
    if (one.only_watches) return one.transport->probe(peer);
  route(peer).probe(peer);
}

void Peers::mark_left(int peer) {
  for (const NamedTransport& one : transports_)
    if (one.only_watches) one.transport->mark_left(peer);
  route(peer).mark_left(peer);
}

void Peers::flush_and_wake() {
  local_ranks_->wake_marked();
  for (auto& [name, transport, only_watches] : transports_) transport->flush();
}

void Peers::wake_urgently(int peer) {
  if (is_local(peer)) local_ranks_->wake_urgently(local_index(peer));
}

bool Peers::network_busy() const {
  return std::any_of(transports_.begin(), transports_.end(), [](auto& one) { return one.transport->busy(); });
}

uint64_t Peers::sent_bytes(const std::string& wanted) const {
  uint64_t bytes = 0;
  for (const auto& [name, transport, only_watches] : transports_)
    if (name == wanted) bytes += transport->sent_bytes();
  return bytes;
}

NetworkFaults Peers::network_faults() {
  NetworkFaults all;
  for (const auto& one : transports_) {
    const NetworkFaults faults = one.transport->faults();
    all.retransmits += faults.retransmits;
    all.reconnects += faults.reconnects;
  }
  return all;
}

void Peers::end_links(const Error& cause) {
  for (auto& [name, transport, only_watches] : transports_) transport->end(cause);
}

bool Peers::finish_links() {
  bool delivered = true;
  for (auto& [name, transport, only_watches] : transports_) {
    const bool done = transport->finish();
    delivered &= done || only_watches;  // nothing was committed there
  }
  return delivered;
}

void Peers::close_links() {
  for (auto& [name, transport, only_watches] : transports_) transport->close();
}

void Peers::close_in_child(bool transports_are_whole) {
  if (heartbeats_) heartbeats_->close_in_child();
  if (!transports_are_whole) return;
  for (auto& [name, transport, only_watches] : transports_) transport->close_in_child();
}

// ---- sleeping

void Peers::wait_for_network(uint64_t timeout_ns) { poll_transports(timeout_ns, -1); }

void Peers::poll_transports(uint64_t timeout_ns, int also) {
  std::array<pollfd, kMostTransports + 1> fds{{{also, POLLIN, 0}}};
  nfds_t count = 1;
  for (auto& [name, transport, only_watches] : transports_) {
    fds[count++] = {transport->descriptor(), POLLIN, 0};
    timeout_ns = std::min(timeout_ns, transport->arm());
  }
  const timespec timeout{time_t(timeout_ns / 1'000'000'000), long(timeout_ns % 1'000'000'000)};
  ppoll(fds.data(), count, timeout_ns == Pollable::kForever ? nullptr : &timeout, nullptr);
}

bool Peers::become_poller(Sleeper who) {
  int holder = kNobody;
  if (poller_.compare_exchange_strong(holder, int(who))) return true;
  if (who == Sleeper::caller && holder == int(Sleeper::engine_thread)) local_ranks_->set_event();
  return false;
}

}  // namespace lightcc
