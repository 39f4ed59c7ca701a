#include "harp_plugin/core/incoming.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

namespace harp {

namespace {

// The memory of messages that packets are guessed to be for. It must not overlap: a packet that belongs elsewhere is
// put together from where it was guessed to be.
class Apart {
 public:
  bool add(const uint8_t* begin, uint32_t bytes) {
    const uint8_t* end = begin + bytes;
    const bool beside = count_ == 0 || end <= low_ || begin >= high_;
    for (size_t i = 0; !beside && i < count_; ++i)
      if (begin < places_[i].second && places_[i].first < end) return false;
    if (count_ == places_.size()) return false;
    low_ = count_ == 0 ? begin : std::min(low_, begin);
    high_ = count_ == 0 ? end : std::max(high_, end);
    places_[count_++] = {begin, end};
    return true;
  }

 private:
  std::array<std::pair<const uint8_t*, const uint8_t*>, 64> places_;
  size_t count_ = 0;
  const uint8_t *low_ = nullptr, *high_ = nullptr;  // all lie between
};

}  // namespace

Incoming::Incoming(uint32_t most_requests, const Options& options)
    : options_(options), most_(most_requests), messages_(std::bit_ceil(most_requests + options.eager_messages)) {}

// Every field of the header against what is known of its message.
bool Incoming::check(const Message& message, const Header& header, size_t bytes, uint32_t packet_payload,
                     uint32_t* segment) const {
  if (header.flags & kStream) return false;
  if (message.started && message.bytes != header.total) return false;
  if (header.flags & kTooLong) {
    return message.posted && header.total > message.capacity && header.offset == 0 && bytes == 0;
  }
  // A message that was granted is never longer than its buffer; the eager pool takes no more than it was made for.
  const bool eager_size = header.total <= options_.eager_bytes;
  if (message.posted ? header.total > message.capacity && !eager_size : !eager_size) return false;
  const uint64_t offset = uint64_t(header.offset) * kOffsetUnit;
  if (offset % packet_payload != 0 || (header.total == 0 ? offset != 0 : offset >= header.total)) return false;
  *segment = uint32_t(offset / packet_payload);
  return bytes == Segments{header.total, packet_payload}.length(*segment);
}

void Incoming::start(Message& message, const Header& header, uint32_t packet_payload) {
  message.started = true;
  message.done = false;
  message.too_long = header.flags & kTooLong;
  message.bytes = header.total;
  message.segments = message.too_long ? 1 : Segments{header.total, packet_payload}.count();
  message.received.reset(message.segments);
}

uint8_t* Incoming::eager(uint64_t number) {
  if (!eager_) eager_ = std::make_unique<uint8_t[]>(size_t(options_.eager_messages) * options_.eager_bytes);
  return eager_.get() + number % options_.eager_messages * options_.eager_bytes;
}

uint8_t* Incoming::place(Message& message, uint64_t number) { return message.posted ? message.to : eager(number); }

// Segments that have not come yet are copied as they lie, and written once more when they come.
void Incoming::take_eager(Message& message, uint64_t number) {
  if (message.bytes > 0) std::memcpy(message.to, eager(number), message.bytes);
}

void Incoming::retire() {
  for (; oldest_ < posted_ && at(oldest_).done; ++oldest_) {
    Message& message = at(oldest_);
    message.posted = message.started = message.done = message.too_long = false;
  }
}

// The next segments of the message that came last, then of those that are posted behind it, if they are as long.
size_t Incoming::expect(std::span<Expected> expected, uint32_t conn, uint32_t packet_payload) const {
  size_t count = 0;
  Apart apart;
  uint64_t number = latest_;
  uint32_t segment = latest_segment_ + 1, bytes = 0;
  if (number >= oldest_ && number < posted_) {
    const Message& message = at(number);
    if (!message.started) return 0;
    bytes = message.bytes;
    if (message.done) segment = message.segments;
  } else if (number + 1 == oldest_) {
    bytes = latest_bytes_;
    segment = UINT32_MAX;
  } else {
    return 0;
  }
  for (; number < posted_ && count < expected.size(); ++number, segment = 0) {
    if (number < oldest_) continue;
    const Message& message = at(number);
    if (message.done) continue;
    if (message.started ? message.bytes != bytes : bytes > message.capacity) break;
    if (!apart.add(message.to, bytes)) break;
    const Segments cut{bytes, packet_payload};
    for (; segment < cut.count() && count < expected.size(); ++segment) {
      if (message.started && message.received.test(segment)) return count;
      const uint64_t offset = cut.offset(segment);
      expected[count++] = {conn, uint16_t(number), uint32_t(offset / kOffsetUnit), bytes, message.to + offset,
                           cut.length(segment)};
    }
  }
  return count;
}

}  // namespace harp
