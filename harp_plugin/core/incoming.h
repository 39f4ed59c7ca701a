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
#include "harp_plugin/core/segments.h"

namespace harp {

enum class Arrival : uint8_t { accepted, duplicate, refused };

class Incoming {
 public:
  Incoming(uint32_t most_requests, const Options&);

  bool has_all(uint64_t number) const {  // of a message whose buffer is not posted yet
    const Message& message = at(number);
    return message.started && !message.posted && message.received.count() == message.segments;
  }
  bool full() const { return posted_ - oldest_ >= most_; }
  template <class Done> void post(uint8_t* to, uint32_t capacity, uint64_t request, const Done& done) {
    Message& message = at(posted_++);
    if (!message.started) message.done = false;
    message.to = to;
    message.capacity = capacity;
    message.request = request;
    message.posted = true;
    if (!message.started) return;
    if (message.bytes <= capacity) take_eager(message, posted_ - 1);
    if (message.bytes > capacity || message.received.count() == message.segments) finish(message, done);
  }

  // A DATA packet, checked. `placed` counts payloads that lay where they belong already.
  template <class Done>
  Arrival arrive(const Header& header, std::span<const uint8_t> payload, uint32_t packet_payload, Counters& counters,
                 const Done& done) {
    const uint64_t number = expand(header.message, posted_);
    if (number < oldest_) return Arrival::duplicate;
    if (number >= posted_ + options_.eager_messages || number >= oldest_ + messages_.size()) return Arrival::refused;
    Message& message = at(number);
    if (message.posted && message.done) return Arrival::duplicate;
    uint32_t segment = 0;
    if (!check(message, header, payload.size(), packet_payload, &segment)) return Arrival::refused;
    if (!message.started) start(message, header, packet_payload);
    if (!message.received.set(segment)) return Arrival::duplicate;
    const bool too_long = message.posted && message.bytes > message.capacity;
    if (!too_long && !payload.empty()) {
      uint8_t* to = place(message, number) + uint64_t(segment) * packet_payload;
      if (to == payload.data()) {
        ++counters.placed;
      } else {
        std::memcpy(to, payload.data(), payload.size());
      }
    }
    message.next_alike |= header.flags & kNextAlike;
    latest_ = number;
    latest_segment_ = segment;
    latest_says_ = message.says_of_next();
    if (message.posted && (too_long || message.received.count() == message.segments)) finish(message, done);
    return Arrival::accepted;
  }

  template <class Done> void fail(uint64_t from, Status status, const Done& done) {
    for (uint64_t number = std::max(from, oldest_); number < posted_; ++number) {
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

  // Segments of messages whose length is known: behind a message its buffer is not written into, whatever comes.
  size_t expect(std::span<Expected>, uint32_t conn, uint32_t packet_payload) const;

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
  bool check(const Message&, const Header&, size_t bytes, uint32_t packet_payload, uint32_t* segment) const;
  void start(Message&, const Header&, uint32_t packet_payload);
  uint8_t* place(Message&, uint64_t number);
  uint8_t* eager(uint64_t number);
  void take_eager(Message&, uint64_t number);
  void retire();
  template <class Done> void finish(Message& message, const Done& done) {
    message.done = true;
    const bool too_long = message.too_long || message.bytes > message.capacity;
    const Completion completion{message.request, too_long ? Status::too_long : Status::ok, message.bytes};
    retire();
    done(completion);
  }

  const Options options_;
  const uint32_t most_;
  std::vector<Message> messages_;  // a ring by number
  std::unique_ptr<uint8_t[]> eager_;
  uint64_t posted_ = 0, oldest_ = 0;  // number of the next buffer to be posted, of the first message that is not done
  uint64_t latest_ = 0;               // of which a segment came last, and which segment
  uint32_t latest_segment_ = 0;
  std::optional<uint32_t> latest_says_;  // how long the message behind it is, if that is known
};

}  // namespace harp
