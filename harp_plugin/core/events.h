// What comes of an endpoint's calls, as values: the endpoint calls nobody. Its calls append to one memory, which its
// owner empties after each of them, so that the path of data allocates nothing.
//
// Invariants:
//   1. An event tells what is so already: a call that has returned has nothing more to do for it.
//   2. Of one connection, Opened comes before all else, and the requests that an end of it has ended before Failed.
//   3. After close() a connection has no events but the completions of its requests.
//   4. A record's bytes, and the memory of a packet that was kept, are the port's until the packet, which is in
//      `released` then, is given back to the port. Failed::why is the connection's until the endpoint's next advance().
//   5. An event is copied as bytes: it owns nothing.
#pragma once
#include <optional>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

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
  std::string_view why;
};

}  // namespace event

using Event = std::variant<event::Opened, event::Completed, event::Received, event::Failed>;
static_assert(std::is_trivially_copyable_v<Event>);

class Events {
 public:
  template <class E> void tell(const E& event) { told_.emplace_back(event); }
  // The next one, in order; it stays there until the endpoint is called. nullptr: that was all.
  const Event* next() {
    if (next_ < told_.size()) return &told_[next_++];
    told_.clear();
    next_ = 0;
    return nullptr;
  }

  std::vector<RxPacket> released;  // were kept and are not needed any more; the owner gives them to Port::release()
  uint32_t kept = 0;               // packets that streams keep
  void release(const RxPacket& packet) {
    --kept;
    released.push_back(packet);
  }

 private:
  std::vector<Event> told_;
  size_t next_ = 0;
};

}  // namespace harp
