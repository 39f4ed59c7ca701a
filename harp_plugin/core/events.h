// What comes of an endpoint's calls, as values: the endpoint calls nobody. Its calls append to one memory, which its
// owner empties after each of them, so that the path of data allocates nothing.
//
// Invariants:
//   1. An event tells what is so already: a call that has returned has nothing more to do for it.
//   2. Of one connection, Opened comes before all else, and the requests that an end of it has ended before Failed.
//   3. After close() a connection has no events but the completions of its requests, in that call.
//   4. A record's bytes, and the memory of a packet that was kept, are the port's until the packet, which is in
//      `released` then, is given back to the port.
#pragma once
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/fifo.h"
#include "harp_plugin/core/connection.h"

namespace harp {

namespace event {

struct Opened {
  ConnectionId id;
  std::optional<Nonce> listener;  // whose it is; none: one of our own, that the peer has accepted
  Address peer;
};
struct Completed {
  ConnectionId id;
  Completion completion;
};
struct Received {  // the next record of a stream, in order; consume() gives it back
  ConnectionId id;
  Record record;
};
struct Failed {
  ConnectionId id;
  Status status;
  std::string why;
};

}  // namespace event

using Event = std::variant<event::Opened, event::Completed, event::Received, event::Failed>;

struct Events {
  lightcc::Fifo<Event> told;       // in order
  std::vector<RxPacket> released;  // were kept and are not needed any more; the owner gives them to Port::release()
  uint32_t kept = 0;               // packets that streams keep

  void release(const RxPacket& packet) {
    --kept;
    released.push_back(packet);
  }
};

}  // namespace harp
