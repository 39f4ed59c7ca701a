#include "harp_plugin/port/udp_receiver.h"

#include <netinet/in.h>
#include <netinet/udp.h>

#include <cstring>

#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace harp {

namespace {

constexpr size_t kSmallFrames = 1024, kLargeFrames = 48;
constexpr size_t kLargestDatagram = 65535;
constexpr size_t kHeaderRoom = 64;  // in a frame, before the payload, which so lies on a cache line
constexpr uint64_t kTrialNs = kSecond;
constexpr uint32_t kTrialReceptions = 128;  // after which the mode is decided
constexpr uint64_t kLargeBit = uint64_t(1) << 32;  // in RxPacket::frame: of the large pool
constexpr size_t kLargeBatch = 8;

size_t round_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

bool is(const Expected& expected, const Header& header) {
  return header.type == Type::data && header.flags == 0 && header.conn == expected.conn &&
         header.message == expected.message && header.offset == expected.offset && header.total == expected.total;
}

}  // namespace

UdpReceiver::Pool::Pool(size_t count, size_t frame_bytes) : memory(count * frame_bytes + 64) {
  uint8_t* begin = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  for (size_t i = count; i-- > 0;) free.push_back(uint32_t(i));
  for (size_t i = 0; i < count; ++i) frames.push_back({begin + i * frame_bytes, 0});
}

// A frame has room for the payload of a full packet that lies elsewhere by mistake, and as much behind it.
UdpReceiver::UdpReceiver(int socket, uint16_t local, uint32_t payload, bool gro, UdpCounters& counters)
    : socket_(socket), local_(local), payload_(payload), may_gro_(gro), counters_(counters),
      mode_(gro ? Mode::gro : Mode::direct), small_(kSmallFrames, kHeaderRoom + 2 * round_up(payload + kTagBytes)),
      large_(gro ? kLargeFrames : 0, round_up(kLargestDatagram + 1)), trial_left_(kTrialReceptions), messages_(kBatch),
      pieces_(3 * kBatch), names_(kBatch), controls_(kBatch), frames_(kBatch) {
  if (gro) set_gro(true);
}

void UdpReceiver::set_gro(bool on) {
  const int value = on;
  setsockopt(socket_, SOL_UDP, UDP_GRO, &value, sizeof value);
}

size_t UdpReceiver::receive(std::span<RxPacket> packets, std::span<const Expected> expected, uint64_t now_ns) {
  if (mode_ == Mode::direct && may_gro_ && now_ns >= next_trial_ns_) {
    mode_ = Mode::gro;
    trial_left_ = kTrialReceptions;
    trial_aggregates_ = 0;
    set_gro(true);
  }
  if (mode_ == Mode::direct) return receive_direct(packets, expected);
  const size_t count = receive_aggregates(packets);
  if (mode_ == Mode::gro && trial_left_ == 0) {
    // One datagram a reception is no gain that pays for the copy.
    if (trial_aggregates_ * 4 < kTrialReceptions) {
      set_gro(false);
      mode_ = Mode::draining;  // what is queued already may be aggregates
    }
    trial_left_ = kTrialReceptions;
    trial_aggregates_ = 0;
  }
  if (mode_ == Mode::draining && count == 0) {
    mode_ = Mode::direct;
    next_trial_ns_ = now_ns + kTrialNs;
  }
  return count;
}

size_t UdpReceiver::receive_direct(std::span<RxPacket> packets, std::span<const Expected> expected) {
  const size_t wanted = std::min({packets.size(), batch_, small_.free.size()});
  for (size_t i = 0; i < wanted; ++i) {
    const uint32_t frame = frames_[i] = small_.free[small_.free.size() - 1 - i];
    uint8_t* bytes = small_.frames[frame].bytes;
    iovec* piece = &pieces_[3 * i];
    size_t count = 0;
    piece[count++] = {bytes, kHeaderBytes};
    if (i < expected.size()) piece[count++] = {expected[i].at, expected[i].bytes};
    piece[count++] = {bytes + kHeaderRoom, payload_ + kTagBytes};
    messages_[i].msg_hdr = {.msg_name = &names_[i],
                            .msg_namelen = sizeof names_[i],
                            .msg_iov = piece,
                            .msg_iovlen = count,
                            .msg_control = nullptr,
                            .msg_controllen = 0,
                            .msg_flags = 0};
  }
  if (wanted == 0) return 0;
  ++counters_.received_calls;
  const int received = recvmmsg(socket_, messages_.data(), unsigned(wanted), MSG_DONTWAIT, nullptr);
  if (received <= 0) return 0;
  batch_ = std::min(kBatch, std::max<size_t>(8, size_t(received) * 2));
  size_t count = 0;
  small_.free.resize(small_.free.size() - size_t(received));
  for (size_t i = 0; i < size_t(received); ++i) {
    RxPacket& packet = packets[count];
    const bool whole = !(messages_[i].msg_hdr.msg_flags & MSG_TRUNC) && messages_[i].msg_len >= kHeaderBytes;
    if (whole && hand_out(i < expected.size() ? &expected[i] : nullptr, frames_[i], messages_[i].msg_len, &packet)) {
      packet.local = local_;
      packet.from.size = uint8_t(messages_[i].msg_hdr.msg_namelen);
      std::memcpy(packet.from.bytes.data(), &names_[i], sizeof(sockaddr_in));
      ++count;
    } else {
      ++counters_.dropped;
      small_.free.push_back(frames_[i]);
    }
  }
  return count;
}

// A datagram of so many bytes, the first of whose payload went to where `expected` says.
bool UdpReceiver::hand_out(const Expected* expected, uint32_t frame, uint32_t bytes, RxPacket* packet) {
  uint8_t* head = small_.frames[frame].bytes;
  const uint32_t payload_bytes = bytes - kHeaderBytes;
  const std::optional<Header> header = read_header({head, kHeaderBytes});
  if (!header) return false;
  packet->head = head;
  packet->head_bytes = kHeaderBytes;
  packet->payload = head + kHeaderRoom;
  packet->payload_bytes = payload_bytes;
  packet->lendable = small_.free.size() > kSmallFrames / 2;
  packet->frame = frame;
  if (!expected) return true;
  if (payload_bytes == expected->bytes && is(*expected, *header)) {
    packet->payload = expected->at;
    ++counters_.placed;
    return true;
  }
  // Back together in the frame: first what lies in the wrong place, then what did not fit there.
  ++counters_.misplaced;
  const uint32_t elsewhere = std::min(payload_bytes, expected->bytes), rest = payload_bytes - elsewhere;
  if (rest > 0) std::memmove(head + kHeaderRoom + elsewhere, head + kHeaderRoom, rest);
  std::memcpy(head + kHeaderRoom, expected->at, elsewhere);
  return true;
}

size_t UdpReceiver::receive_aggregates(std::span<RxPacket> packets) {
  size_t count = split(packets);
  if (count == packets.size()) return count;
  const size_t wanted = std::min(kLargeBatch, large_.free.size());
  for (size_t i = 0; i < wanted; ++i) {
    frames_[i] = large_.free[large_.free.size() - 1 - i];
    pieces_[i] = {large_.frames[frames_[i]].bytes, kLargestDatagram};
    messages_[i].msg_hdr = {.msg_name = &names_[i],
                            .msg_namelen = sizeof names_[i],
                            .msg_iov = &pieces_[i],
                            .msg_iovlen = 1,
                            .msg_control = controls_[i].data(),
                            .msg_controllen = controls_[i].size(),
                            .msg_flags = 0};
  }
  if (wanted == 0) return count;
  ++counters_.received_calls;
  const int received = recvmmsg(socket_, messages_.data(), unsigned(wanted), MSG_DONTWAIT, nullptr);
  if (received <= 0) return count;
  aggregates_.clear();
  aggregate_ = 0;
  large_.free.resize(large_.free.size() - size_t(received));
  for (size_t i = 0; i < size_t(received); ++i) {
    msghdr& message = messages_[i].msg_hdr;
    const uint32_t bytes = messages_[i].msg_len;
    uint32_t segment = bytes;
    for (cmsghdr* control = CMSG_FIRSTHDR(&message); control; control = CMSG_NXTHDR(&message, control)) {
      if (control->cmsg_level != SOL_UDP || control->cmsg_type != UDP_GRO) continue;
      int value;
      std::memcpy(&value, CMSG_DATA(control), sizeof value);
      segment = uint32_t(value);
    }
    if (trial_left_ > 0) --trial_left_;
    if (segment < bytes) {
      ++trial_aggregates_;
      ++counters_.aggregates;
    }
    if (message.msg_flags & MSG_TRUNC || segment < kHeaderBytes) {
      ++counters_.dropped;
      large_.free.push_back(frames_[i]);
      continue;
    }
    Aggregate aggregate{.frame = frames_[i], .bytes = bytes, .at = 0, .segment = segment, .from = {}};
    aggregate.from.size = uint8_t(message.msg_namelen);
    std::memcpy(aggregate.from.bytes.data(), &names_[i], sizeof(sockaddr_in));
    large_.frames[frames_[i]].references = 1;  // ours, until all of it is handed out
    aggregates_.push_back(aggregate);
  }
  return count + split(packets.subspan(count));
}

size_t UdpReceiver::split(std::span<RxPacket> packets) {
  size_t count = 0;
  for (; aggregate_ < aggregates_.size(); ++aggregate_) {
    Aggregate& aggregate = aggregates_[aggregate_];
    Frame& frame = large_.frames[aggregate.frame];
    while (aggregate.at < aggregate.bytes) {
      if (count == packets.size()) return count;
      const uint32_t bytes = std::min(aggregate.segment, aggregate.bytes - aggregate.at);
      const uint8_t* head = frame.bytes + aggregate.at;
      aggregate.at += bytes;
      if (bytes < kHeaderBytes) {
        ++counters_.dropped;
        continue;
      }
      packets[count++] = {.head = head,
                          .head_bytes = kHeaderBytes,
                          .payload = head + kHeaderBytes,
                          .payload_bytes = bytes - uint32_t(kHeaderBytes),
                          .local = local_,
                          .lendable = large_.free.size() > kLargeFrames / 2,
                          .from = aggregate.from,
                          .frame = aggregate.frame | kLargeBit};
      ++frame.references;
    }
    if (--frame.references == 0) large_.free.push_back(aggregate.frame);
  }
  return count;
}

void UdpReceiver::release(const RxPacket& packet) {
  const uint32_t frame = uint32_t(packet.frame);
  if (!(packet.frame & kLargeBit)) {
    small_.free.push_back(frame);
  } else if (--large_.frames[frame].references == 0) {
    large_.free.push_back(frame);
  }
}

}  // namespace harp
