// All connections of one engine, and how they are opened. No I/O, no clock, no threads: one thread calls.
//
//   while (true) {
//     n = port.rx(packets, {expected, endpoint.expect(expected)});
//     for each: if (!endpoint.receive(packet, now)) port.release(packet)
//     endpoint.advance(now);
//     port.tx(endpoint.transmit(packets, now));
//   }
#pragma once
#include <functional>

#include "harp_plugin/core/connection.h"

namespace harp {

using ConnectionId = uint32_t;  // what the peer's packets carry; 0 is none

// What the owner of an endpoint is told, from within its calls. The owner may call the endpoint again from here, but
// not close() the connection it is told about.
class Events {
 public:
  virtual ~Events() = default;
  // A connection that someone opened to this listener (with its nonce), or one of our own that the peer has accepted.
  virtual void opened(ConnectionId, const Nonce* listener) = 0;
  virtual void completed(ConnectionId, const Completion&) = 0;
  virtual void record(ConnectionId, const Record&) = 0;     // the next of a stream, in order; consume() gives it back
  virtual void failed(ConnectionId, Status, const std::string& why) = 0;  // after its requests have been completed
  virtual void release(const RxPacket&) = 0;                // a kept packet is not needed any more
};

class Endpoint {
 public:
  // `random` gives 64 random bits each time: ids, nonces.
  Endpoint(Options, Events&, std::function<uint64_t()> random);
  ~Endpoint();

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
  // peer has heard or its time-out has passed; nothing is told about it any more except release().
  void close(ConnectionId, uint64_t now_ns);
  // Ends it with no word to the peer: requests complete with this status, and failed() is told why.
  void fail(ConnectionId, Status, const std::string& why);

  // true: the packet is kept, and given back through Events::release (before this returns, if record() consumed it).
  bool receive(const RxPacket&, uint64_t now_ns);
  // What probably comes next, with places that the port may write anything into: they belong to messages that have not
  // all come. They hold until changes() says another number.
  size_t expect(std::span<Expected>) const;
  uint64_t changes() const;
  size_t transmit(std::span<TxPacket>, uint64_t now_ns);  // what is to be sent now; payload pointers into requests
  void advance(uint64_t now_ns);                          // timers that have run out
  bool under_way() const;  // something waits to be sent or acknowledged, on any connection
  uint64_t next_ns() const;                               // when advance() has something to do; UINT64_MAX: never
  bool wants_to_transmit(uint64_t now_ns) const;

  const Counters* counters(ConnectionId) const;  // nullptr: there is none (any more)
  const Counters& strays() const;                // packets that belong to no connection

  static constexpr uint32_t kMostRequests = 256;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace harp
