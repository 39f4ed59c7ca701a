#include "harp_plugin/port/ring_port.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace harp {

namespace {

constexpr size_t kBatch = 64;
constexpr size_t kFlushEvery = 32;  // released slots

// Whether the receiver may read the payload where the sender has it. A record of a stream is lent to an application,
// which may keep it for ever: a sender that closes must not wait for that.
bool may_refer(const TxPacket& packet) { return !packet.tagged && !(packet.head[1] & kStream); }

bool inside(uint64_t base, uint64_t bytes, uint64_t at, uint64_t count) {
  return at >= base && at - base <= bytes && count <= bytes - (at - base);
}

}  // namespace

RingPort::RingPort(Caps caps, std::unique_ptr<Rendezvous> rendezvous, SentRegion pool, uint32_t frames)
    : caps_(std::move(caps)),
      rendezvous_(std::move(rendezvous)),
      pool_region_(std::move(pool)),
      pool_(frames, frame_bytes(caps_.payload)) {}

RingPort::~RingPort() = default;

size_t RingPort::tx(std::span<const TxPacket> packets) {
  flush();  // what these packets acknowledge is given back before they arrive
  for (const TxPacket& packet : packets) {
    if (!last_ || !(last_->to == *packet.to)) {
      if (last_) publish(*last_);
      last_ = link_to(*packet.to);
    }
    if (!last_ || !send(*last_, packet)) {
      done_.add_done();
      ++counters_.lost;
    }
  }
  if (last_) publish(*last_);
  return packets.size();
}

SendLink* RingPort::link_to(const Address& address) {
  const auto found = by_address_.find(address);
  if (found != by_address_.end()) return found->second;
  auto link = rendezvous_->connect(address);
  if (!link) return nullptr;
  return by_address_[address] = links_.senders.emplace_back(std::move(link)).get();
}

// Gives the packet its number if it takes it.
bool RingPort::send(SendLink& link, const TxPacket& packet) {
  const uint32_t tag_bytes = packet.tagged ? kTagBytes : 0;
  const uint32_t bytes = packet.payload_bytes + tag_bytes;
  if (packet.payload_bytes > caps_.payload || packet.head_bytes > kMostControlBytes || link.gone) return false;
  if (!link.ring.has_room(packet.payload_bytes > 0)) {
    collect(link);
    if (!link.ring.has_room(packet.payload_bytes > 0)) return false;
  }
  SlotHeader header{.offset = 0, .region = kInline, .payload_bytes = bytes, .head_bytes = packet.head_bytes};
  Sent sent;
  const uint8_t* inline_payload = nullptr;
  if (packet.head_bytes + bytes <= sizeof(PacketSlot::bytes)) {
    inline_payload = packet.payload;
  } else if (const SentRegion* region = may_refer(packet) ? region_of(link, packet) : nullptr) {
    header.region = region->id;
    header.offset = reinterpret_cast<uintptr_t>(packet.payload) - region->base;
    sent.number = done_.add();
    ++counters_.referred;
  } else {
    if (std::find(link.shown.begin(), link.shown.end(), pool_region_.id) == link.shown.end()) {
      if (!rendezvous_->show(link, pool_region_)) return false;
      link.shown.push_back(pool_region_.id);
    }
    auto frame = pool_.take(link.frames);
    if (!frame) {
      collect(link);
      frame = pool_.take(link.frames);
    }
    if (!frame) return false;
    ++link.frames;
    sent.frame = *frame;
    header.region = pool_region_.id;
    header.offset = pool_.offset(*frame);
    auto* to = reinterpret_cast<uint8_t*>(pool_region_.base) + header.offset;
    std::memcpy(to, packet.payload, packet.payload_bytes);
    if (packet.tagged) std::memcpy(to + packet.payload_bytes, packet.tag.data(), kTagBytes);
    ++counters_.copied;
  }
  if (sent.number == Sent::kDone) done_.add_done();
  PacketSlot& slot = link.ring.put(sent);
  slot.header = header;
  std::memcpy(slot.bytes, packet.head.data(), packet.head_bytes);
  if (header.region == kInline) {
    uint8_t* after = slot.bytes + packet.head_bytes;
    if (packet.payload_bytes) std::memcpy(after, inline_payload, packet.payload_bytes);
    if (packet.tagged) std::memcpy(after + packet.payload_bytes, packet.tag.data(), kTagBytes);
  }
  return true;
}

// The region that holds the payload and that the peer can see.
const SentRegion* RingPort::region_of(SendLink& link, const TxPacket& packet) {
  const auto at = reinterpret_cast<uintptr_t>(packet.payload);
  auto after = std::upper_bound(regions_.begin(), regions_.end(), at,
                                [](uintptr_t address, const SentRegion& region) { return address < region.base; });
  if (after == regions_.begin()) return nullptr;
  const SentRegion& region = *--after;
  if (!inside(region.base, region.bytes, at, packet.payload_bytes)) return nullptr;
  if (link.last_shown == region.id) return &region;
  if (std::find(link.shown.begin(), link.shown.end(), region.id) == link.shown.end()) {
    if (!rendezvous_->show(link, region)) return nullptr;
    link.shown.push_back(region.id);
  }
  link.last_shown = region.id;
  return &region;
}

void RingPort::publish(SendLink& link) {
  if (!link.ring.publish()) return;
  const uint64_t one = 1;
  // Its only failure is a counter that is full already: then it is readable.
  [[maybe_unused]] const ssize_t written = write(link.bell, &one, sizeof one);
}

void RingPort::settle(const Sent& sent, SendLink& link) {
  if (sent.number != Sent::kDone) done_.done(sent.number);
  if (sent.frame == Sent::kNoFrame) return;
  pool_.give_back(sent.frame);
  --link.frames;
}

void RingPort::collect(SendLink& link) {
  link.ring.collect([&](const Sent& sent) { settle(sent, link); });
  if (link.ring.broken()) link.gone = true;
}

uint64_t RingPort::tx_done() {
  attend(false);
  for (const auto& link : links_.senders) {
    if (link->ring.out() > 0) collect(*link);
  }
  return done_.count();
}

void RingPort::attend(bool awake) {
  rendezvous_->attend(links_, awake);
  std::erase_if(links_.senders, [&](const auto& link) {
    if (!link->gone) return false;
    counters_.broken += link->ring.broken();
    link->ring.collect([&](const Sent& sent) { settle(sent, *link); });
    link->ring.abandon([&](const Sent& sent) { settle(sent, *link); });
    by_address_.erase(link->to);
    if (last_ == link.get()) last_ = nullptr;
    return true;
  });
  for (auto& link : links_.receivers) {
    if (!link || !link->ended || link->ring.waiting() || link->ring.lent() > 0) continue;
    link->ring.flush();
    link.reset();
  }
}

size_t RingPort::rx(std::span<RxPacket> packets, std::span<const Expected>) {
  attend(false);
  flush();
  size_t count = 0;
  const size_t links = links_.receivers.size();
  if (links == 0) return 0;
  next_receiver_ = next_receiver_ + 1 < links ? next_receiver_ + 1 : 0;
  for (size_t i = 0, index = next_receiver_; i < links && count < packets.size(); ++i) {
    ReceiveLink* link = links_.receivers[index].get();
    if (link && link->ring.waiting()) {
      count += receive(*link, static_cast<uint32_t>(index), packets.subspan(count));
    }
    index = index + 1 < links ? index + 1 : 0;
  }
  return count;
}

size_t RingPort::receive(ReceiveLink& link, uint32_t index, std::span<RxPacket> packets) {
  std::array<uint32_t, kBatch> slots;
  size_t count = 0;
  const size_t taken = link.ring.take(std::span(slots).first(std::min(packets.size(), kBatch)));
  for (size_t i = 0; i < taken; ++i) {
    RxPacket& packet = packets[count];
    const PacketSlot* slot = link.ring.read(slots[i]);
    if (!slot || !resolve(link, slots[i], *slot, packet)) {
      ++counters_.malformed;
      link.ring.give_back(slots[i]);
      continue;
    }
    packet.head = slot->bytes;
    packet.head_bytes = slot->header.head_bytes;
    if (slot->header.region == kInline && packet.head_bytes > kHeaderBytes && packet.payload_bytes <= kTagBytes) {
      packet.head_bytes += packet.payload_bytes;  // the tag stays behind the body, as body_of() wants it
      packet.payload_bytes = 0;
    }
    packet.local = 0;
    packet.from = link.from;
    packet.frame = uint64_t{index} << 32 | slots[i];
    ++count;
  }
  if (link.ring.pending() > 0) link.ring.flush();
  if (link.ring.broken() && !link.ended) {
    ++counters_.broken;
    link.ended = true;
  }
  return count;
}

// Where the payload is; false: nowhere that the peer may name.
bool RingPort::resolve(ReceiveLink& link, uint32_t number, const PacketSlot& slot, RxPacket& packet) {
  const SlotHeader& header = slot.header;
  link.where[number] = ReceiveLink::kNowhere;
  packet.payload_bytes = header.payload_bytes;
  if (header.region == kInline) {
    packet.payload = slot.bytes + header.head_bytes;
    return true;
  }
  if (link.references_end || header.payload_bytes > caps_.payload + kTagBytes) return false;
  for (int attempt = 0; attempt < 2; ++attempt) {
    for (uint32_t i = 0; i < link.regions.size(); ++i) {
      ReceiveLink::Seen& seen = link.regions[i];
      if (seen.id != header.region) continue;
      if (!inside(0, seen.bytes, header.offset, header.payload_bytes)) return false;
      packet.payload = reinterpret_cast<const uint8_t*>(seen.base + header.offset);
      ++seen.lent;
      link.where[number] = i;
      return true;
    }
    rendezvous_->attend(links_, true);  // its announcement was sent before the packet
  }
  return false;
}

void RingPort::release(std::span<const RxPacket> packets) {
  for (const RxPacket& packet : packets) {
    const auto index = static_cast<uint32_t>(packet.frame >> 32);
    const auto slot = static_cast<uint32_t>(packet.frame);
    ReceiveLink& link = *links_.receivers[index];
    if (const uint32_t where = link.where[slot]; where != ReceiveLink::kNowhere) {
      ReceiveLink::Seen& seen = link.regions[where];
      if (--seen.lent == 0 && seen.forgotten) seen = {};
    }
    if (link.ring.pending() == 0) to_flush_.push_back(index);
    link.ring.give_back(slot);
    if (link.ring.pending() >= kFlushEvery) link.ring.flush();
  }
}

void RingPort::flush() {
  for (const uint32_t index : to_flush_) {
    if (links_.receivers[index]) links_.receivers[index]->ring.flush();
  }
  to_flush_.clear();
}

bool RingPort::arm() {
  flush();
  bool nothing = true;
  for (const auto& link : links_.receivers) {
    if (link && !link->ring.arm()) nothing = false;
  }
  if (!nothing) lower_flags();
  return nothing;
}

void RingPort::disarm() {
  lower_flags();
  attend(true);
}

void RingPort::lower_flags() {
  for (const auto& link : links_.receivers) {
    if (link) link->ring.disarm();
  }
}

void RingPort::add_region(std::shared_ptr<Region> region) {
  const auto base = reinterpret_cast<uintptr_t>(region->data());
  add_region({region->id(), base, region->bytes(), std::move(region)});
}

void RingPort::add_region(SentRegion region) {
  const auto after = std::upper_bound(regions_.begin(), regions_.end(), region.base,
                                      [](uintptr_t base, const SentRegion& other) { return base < other.base; });
  regions_.insert(after, std::move(region));
}

void RingPort::remove_region(const Region& region) {
  std::erase_if(regions_, [&](const SentRegion& own) { return own.id == region.id(); });
  for (const auto& link : links_.senders) {
    if (link->last_shown == region.id()) link->last_shown = 0;
    if (std::erase(link->shown, region.id()) > 0) rendezvous_->hide(*link, region.id());
  }
}

}  // namespace harp
