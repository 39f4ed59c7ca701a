#include "harp_plugin/port/packet_ring.h"

#include <cstring>

namespace harp {

PacketSender::PacketSender(PacketRing* ring)
    : ring_(ring),
      numbers_(&ring->sent, ring->sent_numbers, kRingSlots),
      returned_(&ring->returned, ring->returned_numbers, kRingSlots),
      sent_(kRingSlots) {
  free_.reserve(kRingSlots);
  for (uint32_t i = kRingSlots; i > 0; --i) free_.push_back(i - 1);
}

PacketReceiver::PacketReceiver(PacketRing* ring)
    : ring_(ring),
      numbers_(&ring->sent, ring->sent_numbers, kRingSlots),
      returned_(&ring->returned, ring->returned_numbers, kRingSlots),
      lent_(kRingSlots),
      copies_(std::make_unique_for_overwrite<PacketSlot[]>(kRingSlots)) {}

size_t PacketReceiver::take(std::span<uint32_t> numbers) {
  if (broken_) return 0;
  const size_t count = numbers_.pop(numbers);
  for (size_t i = 0; i < count; ++i) {
    if (numbers[i] >= kRingSlots || lent_[numbers[i]]) {
      broken_ = true;
      return i;
    }
    lent_[numbers[i]] = true;
    ++lent_count_;
    __builtin_prefetch(&ring_->slots[numbers[i]]);
  }
  return count;
}

const PacketSlot* PacketReceiver::read(uint32_t number) {
  const PacketSlot& slot = ring_->slots[number];
  PacketSlot& copy = copies_[number];
  copy.header = slot.header;
  // The compiler may not read the header a second time: what is checked below is what is used.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  const SlotHeader header = copy.header;
  if (header.head_bytes < kHeaderBytes || header.head_bytes > kMostControlBytes) return nullptr;
  size_t bytes = header.head_bytes;
  if (header.region == kInline) {
    if (header.payload_bytes > sizeof(slot.bytes) - bytes) return nullptr;
    bytes += header.payload_bytes;
  }
  std::memcpy(copy.bytes, slot.bytes, bytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return &copy;
}

}  // namespace harp
