// The receiving half of a connection in stream mode: a record is one packet, delivered in order, lent to the
// application until it is consumed. Credit is counted in records that are held unread.
#pragma once
#include <bit>
#include <optional>
#include <vector>

#include "harp_plugin/core/connection.h"
#include "harp_plugin/core/incoming.h"

namespace harp {

class IncomingStream {
 public:
  explicit IncomingStream(uint32_t frames) : frames_(frames), records_(std::bit_ceil(frames)) {}

  // The record of this packet. `keep`: the packet may be kept; otherwise the payload is copied.
  Arrival arrive(const Packet& packet, bool keep) {
    const Header& header = packet.header;
    const uint64_t number = expand(header.message, delivered_);
    if (number < delivered_) return Arrival::duplicate;
    if (number >= limit() || header.offset != 0 || header.total != packet.body.size()) return Arrival::refused;
    if (!(header.flags & kStream) || header.flags & kTooLong) return Arrival::refused;
    Held& held = at(number);
    if (held.there) return Arrival::duplicate;
    held.there = true;
    held.kept = keep;
    if (keep) {
      held.record = {packet.body.data(), uint32_t(packet.body.size())};
      held.packet = packet.came;
    } else {
      held.copy.assign(packet.body.begin(), packet.body.end());
      held.record = {held.copy.data(), uint32_t(packet.body.size())};
    }
    return Arrival::accepted;
  }
  // The record that is next in order, if it is there; it counts as delivered.
  std::optional<Record> deliver() {
    if (delivered_ == limit() || !at(delivered_).there) return std::nullopt;
    return at(delivered_++).record;
  }

  template <class Release> void consume(uint64_t records, const Release& release) {
    for (; records > 0 && consumed_ < delivered_; --records, ++consumed_) drop(at(consumed_), release);
  }
  template <class Release> void clear(const Release& release) {
    for (Held& held : records_)
      if (held.there) drop(held, release);
    consumed_ = delivered_;
  }

  uint64_t limit() const { return consumed_ + frames_; }  // the first record that may not be sent yet
  uint64_t delivered() const { return delivered_; }

 private:
  struct Held {
    bool there = false, kept = false;
    Record record;
    RxPacket packet;  // that was kept
    std::vector<uint8_t> copy;
  };
  Held& at(uint64_t number) { return records_[number & (records_.size() - 1)]; }
  template <class Release> void drop(Held& held, const Release& release) {
    held.there = false;
    if (held.kept) release(held.packet);
  }

  const uint32_t frames_;
  std::vector<Held> records_;  // a ring by number
  uint64_t delivered_ = 0, consumed_ = 0;  // numbers of the next record to be delivered, to be consumed
};

}  // namespace harp
