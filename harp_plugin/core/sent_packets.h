// The packets that a connection has sent and whose fate it does not know yet, in a ring by packet number.
#pragma once
#include <bit>
#include <cstdint>
#include <vector>

namespace harp {

enum class Content : uint8_t { nothing, data, grant, probe, close };  // nothing: needs no acknowledgement

struct SentPacket {
  uint64_t sent_ns = 0;
  uint64_t message = 0;        // data: its number; grant: the first granted
  uint64_t path_sequence = 0;  // how many the path had carried before it
  uint32_t segment = 0;        // data: which of the message; grant: how many messages
  uint16_t path = 0;
  Content content = Content::nothing;
  enum class Fate : uint8_t { settled, in_flight, lost, overdue } fate = Fate::settled;
};

class SentPackets {
 public:
  SentPackets(uint64_t first_number, uint32_t most_in_flight)
      : ring_(std::bit_ceil(uint64_t(most_in_flight) * 4 + 64)), next_(first_number), oldest_(first_number) {}

  uint64_t next() const { return next_; }
  uint64_t oldest() const { return oldest_; }  // everything before is settled
  bool full() const { return next_ - oldest_ >= ring_.size(); }

  uint64_t add(SentPacket packet) {
    packet.fate = packet.content == Content::nothing ? SentPacket::Fate::settled : SentPacket::Fate::in_flight;
    at(next_) = packet;
    return next_++;
  }
  SentPacket& at(uint64_t number) { return ring_[number & (ring_.size() - 1)]; }

  // What was taken for lost (others overtook it) or overdue (nothing came) is remembered until `forget_before_ns`, to
  // see whether it was late only.
  void settle(uint64_t forget_before_ns) {
    for (; oldest_ < next_; ++oldest_) {
      const SentPacket& packet = at(oldest_);
      if (packet.fate == SentPacket::Fate::in_flight) return;
      const bool crowded = next_ - oldest_ > ring_.size() / 2;
      if (packet.fate != SentPacket::Fate::settled && packet.sent_ns > forget_before_ns && !crowded) return;
    }
  }

 private:
  std::vector<SentPacket> ring_;
  uint64_t next_, oldest_;
};

}  // namespace harp
