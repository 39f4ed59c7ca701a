#include "harp_plugin/port/udp_receiver.h"

#include <netinet/udp.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/clock.h"

#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace harp {

namespace {

constexpr size_t kLargestDatagram = 65535;
constexpr uint32_t kMostFrames = 1024, kLeastFrames = 256, kAggregateFrames = 48;
constexpr size_t kPoolBytes = 16 << 20;  // where packets are large, fewer frames
constexpr uint64_t kLookNs = 100 * kMillisecond;
constexpr uint32_t kReceptions = 128;  // after which the mode is considered
constexpr uint32_t kMostHesitations = 8;
constexpr uint64_t kAggregateBit = uint64_t{1} << 32;  // in RxPacket::frame

// A frame of a packet alone: the header's slot, then room for all of it, whose payload begins a cache line.
constexpr size_t kAloneRoom = 64 - kHeaderBytes;
static_assert(kAloneRoom >= kHeaderBytes);
// A frame of an aggregate: the slots of so many headers as a batch has packets, then room for all of it.
constexpr size_t kSlotBytes = 24, kAggregateRoom = 64 * kSlotBytes;

// Puts the first `bytes` of what was scattered over `pieces`, whose last is `room`, together in `room`.
void put_together(std::span<const iovec> pieces, uint8_t* room, size_t bytes) {
  size_t elsewhere = 0;
  for (const iovec& piece : pieces.first(pieces.size() - 1)) elsewhere += piece.iov_len;
  if (bytes > elsewhere) std::memmove(room + elsewhere, room, bytes - elsewhere);
  for (const iovec& piece : pieces.first(pieces.size() - 1)) {
    const size_t count = std::min(bytes, piece.iov_len);
    std::memcpy(room, piece.iov_base, count);
    room += count;
    bytes -= count;
  }
}

uint32_t frames_for(uint32_t payload_and_tag) {
  return std::clamp(static_cast<uint32_t>(kPoolBytes / (payload_and_tag + 64)), kLeastFrames, kMostFrames);
}

}  // namespace

UdpPools::UdpPools(uint32_t payload_and_tag, bool gro)
    : alone(frames_for(payload_and_tag), kAloneRoom + kHeaderBytes + payload_and_tag, true),
      aggregates(gro ? kAggregateFrames : 0, kAggregateRoom + kLargestDatagram, false) {}

UdpReceiver::UdpReceiver(int socket, uint16_t local, uint32_t payload, bool gro, UdpPools& pools, UdpCounters& counters)
    : socket_(socket),
      local_(local),
      payload_(payload),
      may_gro_(gro),
      mode_(gro ? GroMode::aggregates : GroMode::alone),
      pools_(pools),
      counters_(counters) {
  for (size_t i = 0; i < kBatch; ++i) {
    batch_->names[i].size = sizeof(sockaddr_in);
    msghdr& message = batch_->messages[i].msg_hdr;
    message.msg_name = batch_->names[i].bytes.data();
    message.msg_iov = batch_->pieces[i].data();
  }
  if (gro) set_gro(true);
}

void UdpReceiver::set_gro(bool on) {
  const int value = on;
  setsockopt(socket_, SOL_UDP, UDP_GRO, &value, sizeof value);
}

size_t UdpReceiver::receive(std::span<RxPacket> packets, std::span<const Expected> expected) {
  if (packets.empty()) return 0;
  // What is expected includes these, so nothing else is received that would be taken for it.
  if (holds_more()) return hand_out_rest(packets);
  const auto too_long = [&](const Expected& one) { return one.bytes > payload_; };
  const auto fitting = std::find_if(expected.begin(), expected.end(), too_long) - expected.begin();
  expected = expected.first(static_cast<size_t>(fitting));
  if (mode_ == GroMode::alone && may_gro_ && lightcc::now_ns() >= next_look_ns_) {
    mode_ = GroMode::aggregates;
    receptions_ = packets_ = 0;
    set_gro(true);
  }
  return mode_ == GroMode::alone ? receive_alone(packets, expected) : receive_aggregates(packets, expected);
}

size_t UdpReceiver::receive_alone(std::span<RxPacket> packets, std::span<const Expected> expected) {
  const size_t wanted = std::min({packets.size(), batch_size_, pools_.alone.free()});
  for (size_t i = 0; i < wanted; ++i) {
    uint8_t* frame = pools_.alone.bytes(pools_.alone.peek(i));
    msghdr& message = batch_->messages[i].msg_hdr;
    iovec* piece = message.msg_iov;
    if (i < expected.size()) {
      *piece++ = {frame, kHeaderBytes};
      *piece++ = {expected[i].at, expected[i].bytes};
    }
    *piece++ = {frame + kAloneRoom, kHeaderBytes + payload_};
    message.msg_iovlen = static_cast<size_t>(piece - message.msg_iov);
    message.msg_namelen = sizeof(sockaddr_in);
  }
  if (wanted == 0) return 0;
  ++counters_.received_calls;
  const int received = recvmmsg(socket_, batch_->messages.data(), static_cast<unsigned>(wanted), MSG_DONTWAIT, nullptr);
  if (received <= 0) return 0;
  batch_size_ = std::clamp<size_t>(static_cast<size_t>(received) * 2, 8, kBatch);
  std::array<uint32_t, kBatch> frames;
  for (size_t i = 0; i < static_cast<size_t>(received); ++i) frames[i] = pools_.alone.take();
  size_t count = 0;
  for (size_t i = 0; i < static_cast<size_t>(received); ++i) {
    const msghdr& message = batch_->messages[i].msg_hdr;
    const uint32_t bytes = batch_->messages[i].msg_len;
    uint8_t* frame = pools_.alone.bytes(frames[i]);
    const bool packet_like =
        bytes >= kHeaderBytes && bytes <= kHeaderBytes + payload_ && !(message.msg_flags & MSG_TRUNC);
    if (!packet_like) {
      ++counters_.dropped;
      pools_.alone.release(frames[i]);
      continue;
    }
    RxPacket& packet = packets[count++];
    packet.head = frame + kAloneRoom;
    packet.head_bytes = kHeaderBytes;
    packet.payload = packet.head + kHeaderBytes;
    packet.payload_bytes = bytes - static_cast<uint32_t>(kHeaderBytes);
    packet.local = local_;
    packet.lendable = pools_.alone.plenty();
    packet.from = batch_->names[i];
    packet.frame = frames[i];
    if (i >= expected.size()) continue;
    if (expected[i].matches(frame, packet.payload_bytes)) {
      packet.head = frame;
      packet.payload = expected[i].at;
      ++counters_.placed;
    } else {
      put_together({message.msg_iov, message.msg_iovlen}, frame + kAloneRoom, bytes);
      ++counters_.misplaced;
    }
  }
  return count;
}

// Datagrams one by one: after an aggregate, what is expected next is for the caller to say.
size_t UdpReceiver::receive_aggregates(std::span<RxPacket> packets, std::span<const Expected> expected) {
  size_t count = 0;
  while (count < packets.size() && mode_ != GroMode::alone) {
    size_t more = 0;
    const int parts = receive_aggregate(packets.subspan(count), expected, &more);
    if (parts < 0) {
      // Aggregates that were queued have been received, unless frames are short: nothing is lost.
      if (mode_ == GroMode::leaving && pools_.aggregates.free() > 0) leave();
      break;
    }
    if (parts <= 1 && more > 0 && !expected.empty() && packets[count].payload == expected.front().at)
      expected = expected.subspan(1);  // what came in between, an acknowledgement most often, took nobody's place
    count += more;
    if (parts > 1) break;
  }
  return count;
}

// Returns how many parts the datagram has, or -1 if there is none (or no frame for it).
int UdpReceiver::receive_aggregate(std::span<RxPacket> packets, std::span<const Expected> expected, size_t* count) {
  if (pools_.aggregates.free() == 0) return -1;
  const uint32_t frame = pools_.aggregates.peek(0);
  uint8_t* const slots = pools_.aggregates.bytes(frame);
  uint8_t* const room = slots + kAggregateRoom;
  expected = expected.first(std::min({expected.size(), packets.size(), kBatch}));
  iovec* const pieces = batch_->aggregate.data();
  size_t used = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    pieces[used++] = {slots + i * kSlotBytes, kHeaderBytes};
    pieces[used++] = {expected[i].at, expected[i].bytes};
  }
  pieces[used++] = {room, kLargestDatagram};
  msghdr message = {.msg_name = batch_->names[0].bytes.data(),
                    .msg_namelen = sizeof(sockaddr_in),
                    .msg_iov = pieces,
                    .msg_iovlen = used,
                    .msg_control = batch_->control.data(),
                    .msg_controllen = batch_->control.size(),
                    .msg_flags = 0};
  ++counters_.received_calls;
  const ssize_t received = recvmsg(socket_, &message, MSG_DONTWAIT);
  if (received < 0) return -1;
  pools_.aggregates.take();
  const auto bytes = static_cast<uint32_t>(received);
  rest_ = {.begin = room, .frame = frame, .bytes = bytes, .segment = bytes, .from = batch_->names[0]};
  if (const cmsghdr* control = CMSG_FIRSTHDR(&message);
      control && control->cmsg_level == SOL_UDP && control->cmsg_type == UDP_GRO) {
    int value;
    std::memcpy(&value, CMSG_DATA(control), sizeof value);
    rest_.segment = static_cast<uint32_t>(value);
  }
  const size_t parts = bytes == 0 ? 1 : (bytes + rest_.segment - 1) / rest_.segment;
  counters_.aggregates += parts > 1;
  consider(parts);
  // Those that are where they belong, from the first on. As long as all are, a header is in its slot.
  size_t hits = 0;
  for (; hits < expected.size() && rest_.at < bytes; ++hits) {
    const Expected& one = expected[hits];
    const uint32_t part = std::min(rest_.segment, bytes - rest_.at);
    if (part < kHeaderBytes || !one.matches(slots + hits * kSlotBytes, part - kHeaderBytes)) break;
    packets[hits] = {.head = slots + hits * kSlotBytes,
                     .head_bytes = kHeaderBytes,
                     .payload = one.at,
                     .payload_bytes = one.bytes,
                     .local = local_,
                     .lendable = pools_.aggregates.plenty(),
                     .from = rest_.from,
                     .frame = frame | kAggregateBit};
    pools_.aggregates.hold(frame);
    rest_.at += part;
  }
  counters_.placed += hits;
  *count = hits;
  rest_.bytes = bytes - rest_.at;
  rest_.at = 0;
  if (rest_.bytes > 0) {
    if (hits < expected.size()) {
      counters_.misplaced += std::min(parts, expected.size()) - hits;
      put_together({pieces + 2 * hits, used - 2 * hits}, room, rest_.bytes);
    }
    *count += hand_out_rest(packets.subspan(hits));
  } else {
    counters_.dropped += bytes == 0;
    pools_.aggregates.release(frame);
  }
  return static_cast<int>(parts);
}

size_t UdpReceiver::hand_out_rest(std::span<RxPacket> packets) {
  size_t count = 0;
  while (holds_more() && count < packets.size()) {
    const uint32_t bytes = std::min(rest_.segment, rest_.bytes - rest_.at);
    const uint8_t* head = rest_.begin + rest_.at;
    rest_.at += bytes;
    if (bytes < kHeaderBytes || bytes > kHeaderBytes + payload_) {
      ++counters_.dropped;
      continue;
    }
    packets[count++] = {.head = head,
                        .head_bytes = kHeaderBytes,
                        .payload = head + kHeaderBytes,
                        .payload_bytes = bytes - static_cast<uint32_t>(kHeaderBytes),
                        .local = local_,
                        .lendable = pools_.aggregates.plenty(),
                        .from = rest_.from,
                        .frame = rest_.frame | kAggregateBit};
    pools_.aggregates.hold(rest_.frame);
  }
  if (!holds_more()) pools_.aggregates.release(rest_.frame);
  return count;
}

void UdpReceiver::consider(size_t packets) {
  packets_ += static_cast<uint32_t>(packets);
  if (++receptions_ < kReceptions) return;
  // A call for each packet costs more than one for many packets alone.
  const bool few = packets_ < kReceptions * 3 / 2;
  mode_ = few ? GroMode::leaving : GroMode::aggregates;
  receptions_ = packets_ = 0;
  hesitations_ = few ? hesitations_ + 1 : 0;
  if (hesitations_ == kMostHesitations) leave();  // the queue is never empty: an aggregate in it would be lost
}

void UdpReceiver::leave() {
  set_gro(false);
  mode_ = GroMode::alone;
  hesitations_ = 0;
  next_look_ns_ = lightcc::now_ns() + kLookNs;
}

void UdpReceiver::release(const RxPacket& packet, UdpPools& pools) {
  (packet.frame & kAggregateBit ? pools.aggregates : pools.alone).release(static_cast<uint32_t>(packet.frame));
}

}  // namespace harp
