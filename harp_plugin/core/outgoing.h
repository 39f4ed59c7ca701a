// The sending half of a connection's data: messages (or records of a stream) that wait, travel and are acknowledged.
// It decides which segment goes next; when it may go is the connection's business.
#pragma once
#include <deque>
#include <optional>
#include <vector>

#include "harp_plugin/core/bitmap.h"
#include "harp_plugin/core/connection.h"
#include "harp_plugin/core/segments.h"

namespace harp {

class Outgoing {
 public:
  struct Segment {
    uint64_t message;
    uint32_t index;
  };
  // What the peer offers, and how packets are cut.
  struct Terms {
    Mode mode;
    uint32_t payload, eager_bytes, eager_messages;
    uint64_t credit;  // stream: records that it takes before it says more
  };

  explicit Outgoing(uint32_t most_requests);
  void agree(const Terms&);

  bool full() const { return next_ - oldest_ >= messages_.size(); }
  void submit(const uint8_t* data, uint32_t bytes, uint64_t request);
  void grant(uint64_t message, uint32_t capacity);
  void credit(uint64_t limit) { credit_ = std::max(credit_, limit); }

  // The segment to send next, what was lost first. next() may be asked again; taken() says that it has been sent.
  std::optional<Segment> next();
  void taken(const Segment&);
  void fill(const Segment&, Header*, TxPacket*) const;
  void lost(const Segment&);

  // Completed requests go to `done`.
  template <class Done> void acknowledged(const Segment& segment, const Done& done) {
    if (segment.message < oldest_) return;
    Message& message = at(segment.message);
    if (message.done || !message.acknowledged.set(segment.index)) return;
    if (message.acknowledged.count() < message.segments) return;
    finish(message, message.too_long ? Status::too_long : Status::ok, done);
  }
  template <class Done> void fail(Status status, const Done& done) {
    for (uint64_t number = oldest_; number < next_; ++number)
      if (Message& message = at(number); !message.done) finish(message, status, done);
    lost_.clear();
    cursor_ = next_;
  }

  bool ready() { return next().has_value(); }
  bool awaits(const Segment& segment) const {  // its acknowledgement
    if (segment.message < oldest_) return false;
    const Message& message = at(segment.message);
    return !message.done && !message.acknowledged.test(segment.index);
  }
  bool was_lost() const { return !lost_.empty(); }  // what next() gave
  bool idle() const { return oldest_ == next_; }
  uint64_t submitted() const { return next_; }
  uint64_t granted() const { return granted_; }  // one past the last message known to be posted

 private:
  struct Message {
    const uint8_t* data = nullptr;
    uint32_t bytes = 0, segments = 1;
    uint32_t sent = 0;  // segments that were sent once
    uint64_t request = 0;
    bool done = true, too_long = false;
    Bitmap acknowledged;
  };
  struct Grant {
    uint64_t message = UINT64_MAX;
    uint32_t capacity = 0;
  };
  Message& at(uint64_t number) { return messages_[number & (messages_.size() - 1)]; }
  const Message& at(uint64_t number) const { return messages_[number & (messages_.size() - 1)]; }
  bool may_start(uint64_t number, Message&);
  template <class Done> void finish(Message& message, Status status, const Done& done) {
    message.done = true;
    const Completion completion{message.request, status, message.bytes};
    while (oldest_ < next_ && at(oldest_).done) ++oldest_;
    cursor_ = std::max(cursor_, oldest_);
    done(completion);
  }

  std::vector<Message> messages_;  // a ring by number
  std::vector<Grant> grants_;      // a ring by number: a buffer may be posted before the message is submitted
  std::deque<Segment> lost_;
  uint64_t next_ = 0, oldest_ = 0;  // number of the next to be submitted, of the first that is not done
  uint64_t cursor_ = 0;             // the first of which not all segments were sent
  uint64_t granted_ = 0, credit_ = 0;
  Terms terms_{};
};

}  // namespace harp
