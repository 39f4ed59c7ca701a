#include "harp_plugin/core/outgoing.h"

#include <bit>

namespace harp {

Outgoing::Outgoing(uint32_t most_requests)
    : messages_(std::bit_ceil(most_requests)), grants_(2 * std::bit_ceil(most_requests)) {}

void Outgoing::agree(const Terms& terms) {
  terms_ = terms;
  credit_ = std::max(credit_, terms.credit);
}

void Outgoing::submit(const uint8_t* data, uint32_t bytes, uint64_t request) {
  Message& message = at(next_++);
  message.data = data;
  message.bytes = bytes;
  message.request = request;
  message.sent = 0;
  message.segments = 0;  // cut when it starts: then the terms are known
  message.done = message.too_long = false;
}

void Outgoing::grant(uint64_t number, uint32_t capacity) {
  if (number < cursor_ || number >= oldest_ + grants_.size()) return;  // started already, or nonsense
  grants_[number & (grants_.size() - 1)] = {number, capacity};
  granted_ = std::max(granted_, number + 1);
}

bool Outgoing::may_start(uint64_t number, Message& message) {
  if (terms_.mode == Mode::stream) {
    if (number >= credit_) return false;
  } else {
    const Grant& grant = grants_[number & (grants_.size() - 1)];
    const bool granted = grant.message == number;
    if (!granted && (message.bytes > terms_.eager_bytes || number >= granted_ + terms_.eager_messages)) return false;
    message.too_long = granted && message.bytes > grant.capacity;
  }
  message.segments = message.too_long ? 1 : Segments{message.bytes, terms_.payload}.count();
  message.acknowledged.reset(message.segments);
  return true;
}

std::optional<Outgoing::Segment> Outgoing::next() {
  while (!lost_.empty()) {
    if (awaits(lost_.front())) return lost_.front();
    lost_.pop_front();
  }
  if (cursor_ == next_) return std::nullopt;
  Message& message = at(cursor_);
  if (message.segments == 0 && !may_start(cursor_, message)) return std::nullopt;
  return Segment{cursor_, message.sent};
}

void Outgoing::taken(const Segment& segment) {
  if (!lost_.empty()) {
    lost_.pop_front();
    return;
  }
  Message& message = at(segment.message);
  if (++message.sent < message.segments) return;
  while (++cursor_ < next_ && at(cursor_).done) {
  }
}

void Outgoing::fill(const Segment& segment, Header* header, TxPacket* packet) const {
  const Message& message = at(segment.message);
  header->message = uint16_t(segment.message);
  header->total = message.bytes;
  if (terms_.mode == Mode::stream) header->flags |= kStream;
  else if (segment.message + 1 < next_ && at(segment.message + 1).bytes == message.bytes) header->flags |= kNextAlike;
  if (message.too_long) {
    header->flags |= kTooLong;
    return;
  }
  const Segments cut{message.bytes, terms_.payload};
  header->offset = uint32_t(cut.offset(segment.index) / kOffsetUnit);
  packet->payload = message.data + cut.offset(segment.index);
  packet->payload_bytes = cut.length(segment.index);
}

void Outgoing::lost(const Segment& segment) { lost_.push_back(segment); }

}  // namespace harp
