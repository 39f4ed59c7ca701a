// The tag that ends a packet where authentication is on: SipHash-2-4 over the whole packet number, of which the wire
// has half, the header and what follows.
#pragma once
#include <cstring>
#include <span>

#include "harp_plugin/core/packet.h"
#include "harp_plugin/core/siphash.h"

namespace harp {

inline uint64_t tag_of(const Key& key, uint64_t number, std::span<const uint8_t> head, std::span<const uint8_t> body) {
  SipHash hash(key);
  hash.update({reinterpret_cast<const uint8_t*>(&number), sizeof number});
  hash.update(head);
  hash.update(body);
  return hash.finish();
}

inline void seal(const Key& key, uint64_t number, TxPacket* packet) {
  const uint64_t tag =
      tag_of(key, number, {packet->head.data(), packet->head_bytes}, {packet->payload, packet->payload_bytes});
  std::memcpy(packet->tag.data(), &tag, sizeof tag);
  packet->tagged = true;
}

// `body` with the tag at its end.
inline bool verify(const Key& key, uint64_t number, std::span<const uint8_t> head, std::span<const uint8_t> body) {
  if (body.size() < kTagBytes) return false;
  uint64_t tag;
  std::memcpy(&tag, body.data() + body.size() - kTagBytes, sizeof tag);
  return tag_of(key, number, head, body.first(body.size() - kTagBytes)) == tag;
}

}  // namespace harp
