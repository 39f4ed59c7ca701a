// Two endpoints, a wire without time between them, and what their owners were told. A test moves packets by hand and
// may take any out of the wire, keep it, change it, hand it over twice.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "harp_plugin/core/endpoint.h"

namespace harp::test {

// A packet as bytes, its own memory.
struct Wire {
  std::vector<uint8_t> head, payload;
  Address from, to;
  uint16_t local = 0;
  Header header() const { return *read_header(head); }
};

inline Address address_of(uint8_t host, uint8_t local) {
  Address address;
  address.bytes[0] = host;
  address.bytes[1] = local;
  address.size = 2;
  return address;
}

// DATA: header and payload apart, tag after the payload. Others: the body behind the header, tag after it.
inline Wire wire_of(const TxPacket& packet, uint8_t from) {
  Wire wire;
  wire.head.assign(packet.head.data(), packet.head.data() + packet.head_bytes);
  if (packet.payload_bytes > 0) wire.payload.assign(packet.payload, packet.payload + packet.payload_bytes);
  if (packet.tagged) {
    const bool data = wire.header().type == Type::data;
    std::vector<uint8_t>& end = data ? wire.payload : wire.head;
    end.insert(end.end(), packet.tag.begin(), packet.tag.end());
  }
  wire.from = address_of(from, uint8_t(packet.local));
  wire.to = *packet.to;
  return wire;
}

inline RxPacket rx_of(const Wire& wire) {
  return {.head = wire.head.data(),
          .head_bytes = uint32_t(wire.head.size()),
          .payload = wire.payload.data(),
          .payload_bytes = uint32_t(wire.payload.size()),
          .local = wire.to.bytes[1],
          .from = wire.from};
}

// An endpoint whose events are carried out before a call returns, as its owner has to.
class CarriedOutEndpoint : public Endpoint {
 public:
  CarriedOutEndpoint(Options options, std::function<uint64_t()> random, std::function<void()> carry_out)
      : Endpoint(std::move(options), std::move(random)), carry_out_(std::move(carry_out)) {}
  bool send(ConnectionId id, const uint8_t* data, uint32_t bytes, uint64_t request, uint64_t now) {
    return carried_out(Endpoint::send(id, data, bytes, request, now));
  }
  bool receive(ConnectionId id, uint8_t* to, uint32_t capacity, uint64_t request, uint64_t now) {
    return carried_out(Endpoint::receive(id, to, capacity, request, now));
  }
  bool receive(const RxPacket& packet, uint64_t now) { return carried_out(Endpoint::receive(packet, now)); }
  void consume(ConnectionId id, uint32_t records, uint64_t now) {
    Endpoint::consume(id, records, now);
    carry_out_();
  }
  void close(ConnectionId id, uint64_t now) {
    Endpoint::close(id, now);
    carry_out_();
  }
  void advance(uint64_t now) {
    Endpoint::advance(now);
    carry_out_();
  }

 private:
  bool carried_out(bool result) {
    carry_out_();
    return result;
  }
  const std::function<void()> carry_out_;
};

class Host {
 public:
  Host(uint8_t number, Options options)
      : number(number), endpoint(std::move(options), [this] { return next(); }, [this] { carry_out_events(); }) {}
  virtual ~Host() = default;

  // What it is told; a test may listen.
  virtual void opened(ConnectionId id, const Nonce*) { connection = id; }
  virtual void completed(ConnectionId, const Completion& done) { completions.push_back(done); }
  virtual void record(ConnectionId, const Record& record) {
    records.emplace_back(reinterpret_cast<const char*>(record.data), record.bytes);
  }
  virtual void failed(ConnectionId, Status status, const std::string& why) { failures.push_back({status, why}); }

  void take(const Wire& wire, uint64_t now) {
    write_where_packets_are_expected();
    const uint64_t frame = next_frame_++;
    auto [it, added] = kept.emplace(frame, wire);
    RxPacket packet = rx_of(it->second);
    packet.frame = frame;
    packet.lendable = lends;
    if (!endpoint.receive(packet, now)) kept.erase(frame);
  }
  std::vector<Wire> give(uint64_t now) {
    std::vector<Wire> wires;
    std::vector<TxPacket> packets(16);
    for (size_t n; (n = endpoint.transmit(packets, now)) > 0;)
      for (size_t i = 0; i < n; ++i) wires.push_back(wire_of(packets[i], number));
    return wires;
  }

  const uint8_t number;
  CarriedOutEndpoint endpoint;
  ConnectionId connection = 0;
  bool lends = true;  // packets that it takes may be kept
  std::vector<Completion> completions;
  std::vector<std::string> records;
  std::vector<std::pair<Status, std::string>> failures;
  std::map<uint64_t, Wire> kept;

 private:
  void carry_out(const event::Opened& one) { opened(one.id, one.listener ? &*one.listener : nullptr); }
  void carry_out(const event::Completed& one) { completed(one.id, one.completion); }
  void carry_out(const event::Received& one) { record(one.id, one.record); }
  void carry_out(const event::Failed& one) { failed(one.id, one.status, std::string(one.why)); }
  void carry_out_events() {
    Events& events = endpoint.events();
    while (const Event* next = events.next()) {
      const Event event = *next;  // a test may call the endpoint while it is told
      std::visit([this](const auto& one) { carry_out(one); }, event);
    }
    for (const RxPacket& packet : events.released) kept.erase(packet.frame);
    events.released.clear();
  }
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15;  // SplitMix64
    uint64_t z = state_ ^ uint64_t(number) << 40;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  // As a port does with packets that are not the expected ones. The first places and the last are enough.
  void write_where_packets_are_expected() {
    const std::span<const Expected> expected = endpoint.expected();
    const size_t count = std::min<size_t>(8, expected.size());
    for (size_t i = 0; i < count; i += std::max<size_t>(1, std::min<size_t>(3, count - 1 - i)))
      std::memset(expected[i].at, 0x5c, expected[i].bytes);
  }
  uint64_t state_ = 1, next_frame_ = 1;
};

class Pair {
 public:
  explicit Pair(Options options = {}, Mode mode = Mode::message) : Pair(options, options, mode) {}
  Pair(Options a_options, Options b_options, Mode mode) : a(1, a_options), b(2, b_options) {
    nonce = b.endpoint.listen();
    a.connection = a.endpoint.connect(address_of(2, 0), nonce, mode, now);
  }
  // Packets go to and fro until nobody has any. `passes` decides which arrive.
  void settle(const std::function<bool(const Wire&)>& passes = [](const Wire&) { return true; }) {
    for (int rounds = 0; rounds < 1000; ++rounds) {
      const std::vector<Wire> from_a = a.give(now), from_b = b.give(now);
      if (from_a.empty() && from_b.empty()) return;
      for (const Wire& wire : from_a)
        if (passes(wire)) b.take(wire, now);
      for (const Wire& wire : from_b)
        if (passes(wire)) a.take(wire, now);
    }
  }
  void later(uint64_t ns) {
    now += ns;
    a.endpoint.advance(now);
    b.endpoint.advance(now);
  }
  // Time passes as timers ask for it, packets move in between.
  void run(uint64_t ns, const std::function<bool(const Wire&)>& passes = [](const Wire&) { return true; }) {
    const uint64_t end = now + ns;
    settle(passes);
    while (now < end) {
      const uint64_t next = std::min({end, a.endpoint.next_ns(), b.endpoint.next_ns()});
      later(next > now ? next - now : 1000);
      settle(passes);
    }
  }

  uint64_t now = 1'000'000'000;
  Host a, b;
  Nonce nonce;
};

}  // namespace harp::test
