// Packets from one port to one other, in memory that both see: slots, and two rings of slot numbers.
//
//   sender --- sent: numbers of filled slots ---> receiver
//   sender <-- returned: numbers of released slots, in any order --- receiver
//
// Invariants:
//   1. A slot is free (the sender's private stack), out (between sent and returned), never both: it is filled again
//      only after the receiver has returned it.
//   2. Each side keeps which slots are where in private memory. A number from the other side is checked against it:
//      what does not fit breaks the ring, and a broken ring moves nothing.
//   3. Sleep: the receiver sets `armed` and then looks at `sent` once more; the sender publishes into `sent` and then
//      clears `armed`. Both are read-modify-writes of one variable, so one comes first: the sender's, and the receiver
//      sees the packet; or the receiver's, and the sender sees that it has to ring. There is no third case.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "harp_plugin/core/packet.h"
#include "harp_plugin/port/spsc_ring.h"

namespace harp {

inline constexpr uint32_t kRingSlots = 1024;
inline constexpr uint32_t kReservedSlots = 128;  // for packets without payload: acknowledgements pass lent records
inline constexpr uint32_t kInline = 0;           // as a region: the payload follows the head in the slot

struct SlotHeader {
  uint64_t offset;  // of the payload in its region
  uint32_t region;
  uint32_t payload_bytes;  // tag included
  uint32_t head_bytes;
};
struct alignas(kCacheLine) PacketSlot {  // the head of DATA lies in the first cache line
  SlotHeader header;
  uint8_t bytes[5 * kCacheLine - sizeof(SlotHeader)];
};
static_assert(sizeof(PacketSlot) == 5 * kCacheLine && kMostControlBytes + kTagBytes <= sizeof(PacketSlot::bytes));

// The shared part. Zeroed memory is a valid one without packets.
struct PacketRing {
  RingIndices sent;
  RingIndices returned;
  alignas(kCacheLine) std::atomic<uint32_t> armed;
  alignas(kCacheLine) uint32_t sent_numbers[kRingSlots];
  uint32_t returned_numbers[kRingSlots];
  PacketSlot slots[kRingSlots];
};

// What the sender remembers of a slot that is out.
struct Sent {
  static constexpr uint64_t kDone = UINT64_MAX;
  static constexpr uint32_t kNoFrame = UINT32_MAX;
  uint64_t number = kDone;     // of the packet, if its payload is read where it was
  uint32_t frame = kNoFrame;   // that holds a copy of its payload
  bool out = false;
};

// The sending end. One thread calls.
class PacketSender {
 public:
  explicit PacketSender(PacketRing* ring);

  bool has_room(bool payload) const { return free_.size() > (payload ? kReservedSlots : 0) && !broken(); }
  // Needs has_room(). The slot to fill; nobody sees it before publish().
  PacketSlot& put(const Sent& what) {
    const uint32_t number = free_.back();
    free_.pop_back();
    sent_[number] = what;
    sent_[number].out = true;
    numbers_.slot(pending_++) = number;
    return ring_->slots[number];
  }
  // Shows what was put; true: the receiver sleeps, and has to be woken.
  bool publish() {
    if (pending_ == 0) return false;
    numbers_.publish(pending_);
    pending_ = 0;
    return ring_->armed.exchange(0, std::memory_order_acq_rel) != 0;
  }
  // Calls each(const Sent&) for every slot that has come back.
  template <class Each>
  void collect(Each&& each) {
    std::array<uint32_t, 64> numbers;
    while (const size_t count = returned_.pop(numbers)) {
      for (size_t i = 0; i < count; ++i) {
        if (numbers[i] >= kRingSlots || !sent_[numbers[i]].out) {
          broken_ = true;
          return;
        }
        free(numbers[i], each);
      }
    }
  }
  // The same for every slot that is still out: the receiver is gone.
  template <class Each>
  void abandon(Each&& each) {
    for (uint32_t number = 0; number < kRingSlots; ++number) {
      if (sent_[number].out) free(number, each);
    }
    broken_ = true;
  }
  uint32_t out() const { return kRingSlots - static_cast<uint32_t>(free_.size()); }
  bool broken() const { return broken_ || returned_.broken(); }

 private:
  template <class Each>
  void free(uint32_t number, Each&& each) {
    sent_[number].out = false;
    free_.push_back(number);
    each(sent_[number]);
  }

  PacketRing* ring_;
  RingProducer<uint32_t> numbers_;
  RingConsumer<uint32_t> returned_;
  size_t pending_ = 0;
  bool broken_ = false;
  std::vector<uint32_t> free_;  // last freed, first used: few slots stay warm
  std::vector<Sent> sent_;
};

// The receiving end. One thread calls.
class PacketReceiver {
 public:
  explicit PacketReceiver(PacketRing* ring);

  bool waiting() { return !broken_ && numbers_.available() > 0; }
  // Numbers of slots that were filled; they are lent until give_back().
  size_t take(std::span<uint32_t> numbers);
  // A private copy of what the slot says: nothing of it changes any more, and header and bytes[] fit together. nullptr:
  // they do not. Valid until give_back().
  const PacketSlot* read(uint32_t number);
  void give_back(uint32_t number) {
    lent_[number] = false;
    --lent_count_;
    if (pending_ >= returned_.room(pending_ + 1)) {  // as many slots as room: only a sender that cheats comes here
      broken_ = true;
      return;
    }
    returned_.slot(pending_++) = number;
  }
  void flush() {  // shows the sender what was given back
    if (pending_ == 0) return;
    returned_.publish(pending_);
    pending_ = 0;
  }
  size_t pending() const { return pending_; }
  uint32_t lent() const { return lent_count_; }
  // The sender shall wake us; false: something is there already.
  bool arm() {
    ring_->armed.exchange(1, std::memory_order_acq_rel);
    return !waiting();
  }
  void disarm() { ring_->armed.store(0, std::memory_order_relaxed); }
  bool broken() const { return broken_ || numbers_.broken() || returned_.broken(); }

 private:
  PacketRing* ring_;
  RingConsumer<uint32_t> numbers_;
  RingProducer<uint32_t> returned_;
  size_t pending_ = 0;
  uint32_t lent_count_ = 0;
  bool broken_ = false;
  std::vector<bool> lent_;
  std::unique_ptr<PacketSlot[]> copies_;  // one a slot, not touched before it is used
};

}  // namespace harp
