#include "harp_plugin/core/incoming.h"

#include <algorithm>
#include <bit>

namespace harp {

Incoming::Incoming(ConnectionId id, const Options& options)
    : id_(id), options_(options), messages_(std::bit_ceil(kMostRequests + options.eager_messages)) {}

std::optional<Completion> Incoming::post(uint8_t* to, uint32_t capacity, uint64_t request) {
  const uint64_t number = posted_++;
  Message& message = at(number);
  if (!message.started) message.done = false;
  message.to = to;
  message.capacity = capacity;
  message.request = request;
  message.posted = true;
  if (!message.started) return std::nullopt;
  if (message.bytes <= capacity) take_eager(message, number);
  if (message.bytes <= capacity && message.received.count() < message.segments) return std::nullopt;
  return finish(message);
}

Arrival Incoming::arrive(const Packet& packet, uint64_t* placed, std::optional<Completion>* done) {
  const uint64_t number = expand(packet.header.message, posted_);
  if (number < oldest_) return Arrival::duplicate;
  if (number >= posted_ + options_.eager_messages || number >= oldest_ + messages_.size()) return Arrival::refused;
  Message& message = at(number);
  if (message.posted && message.done) return Arrival::duplicate;
  uint32_t segment = 0;
  if (!check(message, packet.header, packet.body.size(), &segment)) return Arrival::refused;
  if (!message.started) start(message, packet.header);
  if (!message.received.set(segment)) return Arrival::duplicate;
  const bool too_long = message.posted && message.bytes > message.capacity;
  if (!too_long && !packet.body.empty()) {
    uint8_t* const to = (message.posted ? message.to : eager(number)) + uint64_t(segment) * packet_payload_;
    const bool is_placed = to == packet.body.data();
    if (!is_placed) std::memcpy(to, packet.body.data(), packet.body.size());
    *placed += is_placed;
  }
  message.next_alike |= packet.header.flags & kNextAlike;
  latest_ = number;
  latest_segment_ = segment;
  latest_says_ = message.says_of_next();
  if (message.posted && (too_long || message.received.count() == message.segments)) *done = finish(message);
  return Arrival::accepted;
}

Completion Incoming::finish(Message& message) {
  message.done = true;
  const bool too_long = message.too_long || message.bytes > message.capacity;
  const Completion completion{message.request, too_long ? Status::too_long : Status::ok, message.bytes};
  retire();
  return completion;
}

// Every field of the header against what is known of its message.
bool Incoming::check(const Message& message, const Header& header, size_t bytes, uint32_t* segment) const {
  if (header.flags & kStream) return false;
  if (message.started && message.bytes != header.total) return false;
  if (header.flags & kTooLong) {
    return message.posted && header.total > message.capacity && header.offset == 0 && bytes == 0;
  }
  // A message that was granted is never longer than its buffer; the eager pool takes no more than it was made for.
  const bool eager_size = header.total <= options_.eager_bytes;
  if (message.posted ? header.total > message.capacity && !eager_size : !eager_size) return false;
  const uint64_t offset = uint64_t(header.offset) * kOffsetUnit;
  if (offset % packet_payload_ != 0 || (header.total == 0 ? offset != 0 : offset >= header.total)) return false;
  *segment = uint32_t(offset / packet_payload_);
  return bytes == Segments{header.total, packet_payload_}.length(*segment);
}

void Incoming::start(Message& message, const Header& header) {
  message.started = true;
  message.done = message.next_alike = false;
  message.too_long = header.flags & kTooLong;
  message.bytes = header.total;
  message.segments = message.too_long ? 1 : Segments{header.total, packet_payload_}.count();
  message.received.reset(message.segments);
}

uint8_t* Incoming::eager(uint64_t number) {
  if (!eager_) eager_ = std::make_unique<uint8_t[]>(size_t(options_.eager_messages) * options_.eager_bytes);
  return eager_.get() + number % options_.eager_messages * options_.eager_bytes;
}

// Segments that have not come yet are copied as they lie, and written once more when they come.
void Incoming::take_eager(Message& message, uint64_t number) {
  if (message.bytes > 0) std::memcpy(message.to, eager(number), message.bytes);
}

void Incoming::retire() {
  for (; oldest_ < posted_ && at(oldest_).done; ++oldest_) {
    Message& message = at(oldest_);
    message.posted = message.started = message.done = message.too_long = message.next_alike = false;
  }
}

// The next segments of the message that came last, then those of the next one that is not done. More than two messages
// are never told: the second has begun, which ends the list at what has come of it, or it has not.
size_t Incoming::expect(std::span<Expected> expected) const {
  if (options_.authenticate || latest_ + 1 < oldest_ || latest_ >= posted_) return 0;
  const bool is_over = latest_ < oldest_;
  uint64_t number = is_over ? oldest_ : latest_;
  uint32_t segment = is_over ? 0 : latest_segment_ + 1;
  std::optional<uint32_t> said = is_over ? latest_says_ : std::nullopt;  // how long `number` is, by the one before it
  std::span<const uint8_t> first;
  size_t count = 0;
  for (; number < posted_ && count < expected.size(); ++number, segment = 0) {
    const Message& message = at(number);
    if (!message.started && !said) break;
    const uint32_t bytes = message.started ? message.bytes : *said;
    said = message.says_of_next();
    if (message.done) continue;
    // They must not overlap: a packet that belongs elsewhere is put together from where it was expected.
    const bool beside = message.to + bytes <= first.data() || first.data() + first.size() <= message.to;
    if (bytes > message.capacity || !(first.empty() || beside)) break;
    first = {message.to, bytes};
    const Segments cut{bytes, packet_payload_};
    for (; segment < cut.count() && count < expected.size(); ++segment) {
      if (message.started && message.received.test(segment)) return count;
      const uint64_t offset = cut.offset(segment);
      expected[count++] = {id_, uint16_t(number), uint32_t(offset / kOffsetUnit), bytes, message.to + offset,
                           cut.length(segment)};
    }
    if (!message.started) break;
  }
  return count;
}

}  // namespace harp
