// A network in virtual time: hosts with an endpoint each, wires between them that delay, queue, lose, repeat, reorder
// and damage packets. Everything follows from a seed.
#pragma once
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <vector>

#include "harp/pair.h"

namespace harp::test {

// Which seeds a test of random networks takes: HARP_FIRST_SEED, HARP_SEEDS.
inline uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct WireFaults {
  double loss = 0, duplicate = 0, reorder = 0, flip = 0;
  bool checksum = true;  // damaged packets are dropped, as UDP's checksum does; else they arrive
  size_t most_bytes = SIZE_MAX;  // of a frame; longer ones are lost
};

struct WireShape {
  uint64_t delay_ns = 10 * kMicrosecond;  // one way
  uint64_t reorder_ns = 50 * kMicrosecond;  // by which a reordered packet comes later, at most
  double bits_per_ns = 10;
  size_t queue_bytes = 1 << 20;  // before each receiver; what does not fit is lost
};

class Simulator;

class SimulatedHost : public Host {
 public:
  SimulatedHost(Simulator& simulator, uint8_t number, const Options& options)
      : Host(number, options), simulator_(simulator) {}
  void opened(ConnectionId id, const Nonce* nonce) override {
    if (on_opened) on_opened(id, nonce);
  }
  void completed(ConnectionId id, const Completion& done) override {
    if (on_completed) on_completed(id, done);
  }
  void record(ConnectionId id, const Record& record) override {
    if (on_record) on_record(id, record);
  }
  void failed(ConnectionId id, Status status, const std::string& why) override {
    if (on_failed) on_failed(id, status, why);
  }
  void poll();  // what an engine does in a round

  std::function<void(ConnectionId, const Nonce*)> on_opened;
  std::function<void(ConnectionId, const Completion&)> on_completed;
  std::function<void(ConnectionId, const Record&)> on_record;
  std::function<void(ConnectionId, Status, const std::string&)> on_failed;

  uint64_t sent_until_ns = 0;      // its cable carries what it has sent until then
  uint64_t received_until_ns = 0;  // the queue before it is empty then
  uint64_t wakes_ns = UINT64_MAX;
  uint64_t arrived_bytes = 0, dropped = 0;

 private:
  Simulator& simulator_;
};

class Simulator {
 public:
  explicit Simulator(uint64_t seed) : random(seed) {}

  SimulatedHost& add_host(const Options& options) {
    hosts_.push_back(std::make_unique<SimulatedHost>(*this, uint8_t(hosts_.size() + 1), options));
    return *hosts_.back();
  }
  void at(uint64_t time_ns, std::function<void()> action) {
    events_.push({std::max(time_ns, now), order_++, std::move(action)});
  }
  // Until `done` or this much time has passed. false: time was over first.
  bool run(uint64_t for_ns, const std::function<bool()>& done) {
    const uint64_t end = now + for_ns;
    while (!done()) {
      if (events_.empty() || events_.top().time_ns > end) return false;
      const auto action = std::move(const_cast<Event&>(events_.top()).action);
      now = events_.top().time_ns;
      events_.pop();
      action();
    }
    return true;
  }
  void carry(SimulatedHost& from, Wire wire);
  void wake_at(SimulatedHost& host, uint64_t time_ns) {
    if (time_ns >= host.wakes_ns || time_ns == UINT64_MAX) return;
    host.wakes_ns = time_ns;
    at(time_ns, [this, &host, time_ns] {
      if (host.wakes_ns != time_ns) return;  // it was woken earlier and asked anew
      host.wakes_ns = UINT64_MAX;
      host.poll();
    });
  }
  bool chance(double probability) {
    return probability > 0 && std::uniform_real_distribution<>()(random) < probability;
  }
  uint64_t below(uint64_t limit) { return limit == 0 ? 0 : random() % limit; }

  uint64_t now = kSecond;
  std::mt19937_64 random;
  WireFaults faults;
  WireShape shape;

 private:
  struct Event {
    uint64_t time_ns, order;
    std::function<void()> action;
    bool operator<(const Event& other) const {
      return time_ns != other.time_ns ? time_ns > other.time_ns : order > other.order;
    }
  };
  void arrive(SimulatedHost& to, Wire wire, uint64_t time_ns);
  void damage(Wire* wire) {
    const uint64_t bit = below((wire->head.size() + wire->payload.size()) * 8);
    const uint64_t byte = bit / 8;
    uint8_t& victim = byte < wire->head.size() ? wire->head[byte] : wire->payload[byte - wire->head.size()];
    victim ^= uint8_t(1 << bit % 8);
  }

  std::vector<std::unique_ptr<SimulatedHost>> hosts_;
  std::priority_queue<Event> events_;
  uint64_t order_ = 0;
};

inline void SimulatedHost::poll() {
  endpoint.advance(simulator_.now);
  for (Wire& wire : give(simulator_.now)) simulator_.carry(*this, std::move(wire));
  simulator_.wake_at(*this, std::max(endpoint.next_ns(), simulator_.now + 1000));
}

inline void Simulator::carry(SimulatedHost& from, Wire wire) {
  const size_t bytes = wire.head.size() + wire.payload.size() + 42;  // Ethernet, IPv4, UDP
  from.sent_until_ns = std::max(from.sent_until_ns, now) + uint64_t(double(bytes) * 8 / shape.bits_per_ns);
  const size_t index = wire.to.bytes[0] - 1u;
  if (index >= hosts_.size() || bytes > faults.most_bytes || chance(faults.loss)) return;
  SimulatedHost& to = *hosts_[index];
  uint64_t time = from.sent_until_ns + shape.delay_ns;
  if (chance(faults.reorder)) time += below(shape.reorder_ns);
  if (chance(faults.duplicate)) arrive(to, wire, time + below(shape.reorder_ns));
  if (chance(faults.flip)) {
    if (faults.checksum) return;
    damage(&wire);
  }
  arrive(to, std::move(wire), time);
}

// The queue of the switch before the receiver's cable, then the cable.
inline void Simulator::arrive(SimulatedHost& to, Wire wire, uint64_t time_ns) {
  at(time_ns, [this, &to, wire = std::move(wire)]() mutable {
    const size_t bytes = wire.head.size() + wire.payload.size() + 42;
    const uint64_t queued_ns = to.received_until_ns > now ? to.received_until_ns - now : 0;
    if (double(queued_ns) * shape.bits_per_ns / 8 + double(bytes) > double(shape.queue_bytes)) {
      ++to.dropped;
      return;
    }
    to.received_until_ns = std::max(to.received_until_ns, now) + uint64_t(double(bytes) * 8 / shape.bits_per_ns);
    at(to.received_until_ns, [this, &to, wire = std::move(wire)] {
      to.arrived_bytes += wire.payload.size();
      if (wire.head.size() >= kHeaderBytes) to.take(wire, now);
      to.poll();
    });
  });
}

}  // namespace harp::test
