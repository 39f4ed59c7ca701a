// All connections of one engine, and how they are opened. No I/O, no clock, no threads: one thread calls.
//
//   while (true) {
//     n = port.rx(packets, endpoint.expected());
//     for each: if (!endpoint.receive(packet, now)) port.release(packet), and carry out endpoint.events()
//     endpoint.advance(now), and carry out endpoint.events()
//     port.release(endpoint.events().released)
//     port.tx(endpoint.transmit(packets, now));
//   }
#pragma once
#include <array>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "harp_plugin/core/events.h"
#include "harp_plugin/core/expected.h"

namespace harp {

class Session;

class Endpoint {
 public:
  // `random` gives 64 random bits each time: ids, nonces.
  Endpoint(Options, std::function<uint64_t()> random);
  ~Endpoint();

  // What has come of the calls. The owner takes it after each call of those that are not const; it may call the
  // endpoint while it does.
  Events& events() { return events_; }

  Nonce listen();                       // connections that carry this nonce are accepted
  void stop_listening(const Nonce&);
  ConnectionId connect(const Address&, const Nonce&, Mode, uint64_t now_ns);
  // Message mode. The memory belongs to the endpoint until the request is completed. false: too many requests are
  // waiting (kMostRequests each way), try again later. A request on a failed or closing connection completes with why.
  bool send(ConnectionId, const uint8_t* data, uint32_t bytes, uint64_t request, uint64_t now_ns);
  bool receive(ConnectionId, uint8_t* to, uint32_t capacity, uint64_t request, uint64_t now_ns);
  // Stream mode: send() sends a record, of at most record_bytes(). Records are consumed in order.
  void consume(ConnectionId, uint32_t records, uint64_t now_ns);
  uint32_t record_bytes(ConnectionId) const;
  Mode mode(ConnectionId) const;  // of one that is there
  // Says goodbye and ends it. Requests that are not done complete with Status::cancelled. The id lives on until the
  // peer has heard or its time-out has passed; there are no more events of it.
  void close(ConnectionId, uint64_t now_ns);
  // Ends it with no word to the peer: requests complete with this status, and Failed tells why.
  void fail(ConnectionId, Status, const std::string& why);

  // true: the packet is kept until it is among Events::released.
  bool receive(const RxPacket&, uint64_t now_ns);
  // What probably comes next. They hold until the next call that is not const.
  std::span<const Expected> expected();
  size_t transmit(std::span<TxPacket>, uint64_t now_ns);  // what is to be sent now; payload pointers into requests
  void advance(uint64_t now_ns);                          // timers that have run out
  bool under_way() const { return !active_.empty(); }     // something waits to be sent or acknowledged somewhere
  uint64_t next_ns();                                     // when advance() has something to do; UINT64_MAX: never
  bool wants_to_transmit(uint64_t now_ns) const;

  const Counters* counters(ConnectionId) const;        // nullptr: there is none (any more)
  const Counters& strays() const { return strays_; }   // packets that belong to no connection

 private:
  struct Reset {
    Address to;
    uint16_t local;
    uint32_t conn, number;
  };

  Session* find(ConnectionId) const;
  Session* awake(ConnectionId);  // and it is looked at soon
  void wake(Session*);
  Session* add(const Nonce&, Mode, bool opener, uint64_t now_ns);
  void remove(Session*);
  void link(Session*, bool into_idle);
  void unlink(Session*);
  std::vector<Session*>& list_of(const Session*);
  bool refuse(ConnectionId, uint64_t request);
  void on_open_packet(const Packet&, uint64_t now_ns);
  void on_open(const Packet&, const OpenBody&, uint64_t now_ns);
  void on_open_ack(const Packet&, const OpenBody&, uint64_t now_ns);
  void on_reset(const Packet&);
  void on_stray(const Packet&, uint64_t now_ns);
  bool authentic(const Packet&, const Nonce&) const;
  size_t transmit_resets(std::span<TxPacket>);
  void run_timers(std::vector<Session*>*, uint64_t now_ns, uint64_t pause_ns);

  Options options_;
  const std::function<uint64_t()> random_;
  Events events_;
  std::vector<std::unique_ptr<Session>> sessions_;  // by the low bits of their ids
  std::vector<uint32_t> free_slots_;
  std::vector<Session*> active_;  // that have something to do soon
  std::vector<Session*> idle_;    // the others
  std::vector<Nonce> listeners_;
  std::vector<Reset> resets_, resets_sent_;  // to be sent; those handed out last, whose addresses are still read
  uint64_t resets_due_ns_ = 0;  // if they were sent one each time, the next one would be
  Counters strays_;
  Session* latest_ = nullptr;  // that data came for
  std::array<Expected, kMostExpected> expected_;
  size_t expected_count_ = 0;
  bool expected_holds_ = false;
  size_t turn_ = 0;  // which active session transmits first
  uint64_t idle_look_ns_ = 0, promised_ns_ = 0, advanced_ns_ = 0;
};

}  // namespace harp
