// The receiving half of a connection in message mode: posted buffers, a bounded pool for small messages that come
// before their buffer, and what is still to be granted. A packet counts only after every check.
#pragma once
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "harp_plugin/core/bitmap.h"
#include "harp_plugin/core/connection.h"
#include "harp_plugin/core/expected.h"
#include "harp_plugin/core/segments.h"

namespace harp {

enum class Arrival : uint8_t { accepted, duplicate, refused };

class Incoming {
 public:
  // Of this connection.
  Incoming(ConnectionId, const Options&);
  void agree(uint32_t packet_payload) { packet_payload_ = packet_payload; }  // before anything arrives

  bool has_all(uint64_t number) const {  // of a message whose buffer is not posted yet
    const Message& message = at(number);
    return message.started && !message.posted && message.received.count() == message.segments;
  }
  bool full() const { return posted_ - oldest_ >= kMostRequests; }
  // Both return the request that is done by it.
  std::optional<Completion> post(uint8_t* to, uint32_t capacity, uint64_t request);
  // A DATA packet, checked. `placed` counts payloads that lay where they belong already.
  Arrival arrive(const Packet&, uint64_t* placed, std::optional<Completion>* done);

  template <class Done> void fail(Status status, const Done& done) {
    for (uint64_t number = oldest_; number < posted_; ++number) {
      Message& message = at(number);
      if (message.done) continue;
      message.done = true;
      done(Completion{message.request, status, 0});
    }
    retire();
  }

  // What the peer is to hear: the first message that it was not told about, and whether it cannot send without.
  uint64_t posted() const { return posted_; }
  uint64_t oldest() const { return oldest_; }
  uint32_t capacity(uint64_t number) const { return at(number).capacity; }

  // What comes next, as expected.h promises it: segments of messages whose length is known.
  size_t expect(std::span<Expected>) const;

 private:
  struct Message {
    uint8_t* to = nullptr;
    uint32_t capacity = 0, bytes = 0, segments = 0;
    uint64_t request = 0;
    bool posted = false, started = false, done = false, too_long = false;
    bool next_alike = false;  // the peer says that the next message is as long
    Bitmap received;
    std::optional<uint32_t> says_of_next() const { return next_alike ? std::optional(bytes) : std::nullopt; }
  };
  Message& at(uint64_t number) { return messages_[number & (messages_.size() - 1)]; }
  const Message& at(uint64_t number) const { return messages_[number & (messages_.size() - 1)]; }
  bool check(const Message&, const Header&, size_t bytes, uint32_t* segment) const;
  void start(Message&, const Header&);
  uint8_t* eager(uint64_t number);
  void take_eager(Message&, uint64_t number);
  void retire();
  Completion finish(Message&);

  const ConnectionId id_;
  const Options options_;
  uint32_t packet_payload_ = 0;
  std::vector<Message> messages_;  // a ring by number
  std::unique_ptr<uint8_t[]> eager_;
  uint64_t posted_ = 0, oldest_ = 0;  // number of the next buffer to be posted, of the first message that is not done
  uint64_t latest_ = 0;               // of which a segment came last, and which segment
  uint32_t latest_segment_ = 0;
  std::optional<uint32_t> latest_says_;  // how long the message behind it is, if that is known
};

}  // namespace harp
