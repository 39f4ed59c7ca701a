// What a connection sends, in the order of urgency: opening and closing, control, what was lost, what is new.
#include "harp_plugin/core/session.h"

namespace harp {

namespace {

constexpr uint32_t kPathBurst = 32;  // packets in a row on one path, so that a port can send them as one
constexpr uint64_t kFirstOpenNs = 5 * kMillisecond, kLongestOpenNs = 500 * kMillisecond;
constexpr uint32_t kPathTries = 10;  // OPENs on a further path until it is given up

}  // namespace

void Session::begin(TxPacket* packet, Type type, uint8_t flags, uint16_t path, Header* header) const {
  packet->payload = nullptr;
  packet->payload_bytes = 0;
  packet->tagged = false;
  packet->to = &paths_[path].to;
  packet->local = paths_[path].local;
  *header = Header{.type = type, .flags = flags, .conn = peer_id_, .path = path};
}

void Session::write_sealed_header(Header header, TxPacket* packet) const {
  header.path |= options_.cookie;
  write_header(header, packet->head.data());
}

// The last step of every packet but OPEN and OPEN_ACK: number, header, tag, and the memory of it.
void Session::send_packet(Header* header, TxPacket* packet, SentPacket sent, size_t body_bytes, uint64_t now_ns) {
  // Acknowledgements need no place in flight, yet a number: what waits behind too many of them goes once more.
  if (sent_.full()) {
    if (sent_.at(sent_.oldest()).fate == SentPacket::Fate::in_flight)
      lose(sent_.at(sent_.oldest()), SentPacket::Fate::overdue, now_ns);
    sent_.settle(kNever);
  }
  const uint64_t number = sent_.next();
  header->number = uint32_t(number);
  if (options_.authenticate) header->flags |= kTagged;
  write_sealed_header(*header, packet);
  packet->head_bytes = uint16_t(kHeaderBytes + body_bytes);
  if (options_.authenticate) seal(key_, number, packet);
  Path& path = paths_[header->path];
  sent.sent_ns = now_ns;
  sent.path = header->path;
  sent.path_sequence = path.sequence;
  sent_.add(sent);
  ++counters_.packets_sent;
  if (sent.content == Content::nothing) return;
  ++path.sequence;
  ++path.in_flight;
  if (in_flight_ == 0 && asked_ns_ <= heard_ns_) asked_ns_ = now_ns;
  if (in_flight_++ == 0 || beyond_window_ > 0) timeout_base_ns_ = now_ns;
}

size_t Session::transmit(std::span<TxPacket> packets, uint64_t now_ns) {
  if (finished_ || state_ == State::closed) return 0;
  size_t count = transmit_open(packets, now_ns);
  if (peer_id_ == 0 || (state_ == State::opening && identity_.opener)) return count;
  count += transmit_control(packets.subspan(count), now_ns);
  // An acknowledgement behind data is the short end of what the port sends as one; before it, it would go alone.
  const size_t room = packets.size() - count, kept = ack_due_ && room > 0;
  if (state_ == State::open) count += transmit_data(packets.subspan(count, room - kept), now_ns);
  if (ack_due_ && count < packets.size()) transmit_ack(&packets[count++], now_ns);
  return count;
}

// OPEN on every path until each has answered; OPEN_ACK on a path for each OPEN that came there.
size_t Session::transmit_open(std::span<TxPacket> packets, uint64_t now_ns) {
  size_t count = 0;
  const auto put = [&](Type type, uint16_t path) {
    TxPacket& packet = packets[count++];
    Header header;
    begin(&packet, type, options_.authenticate ? kTagged : 0, path, &header);
    write_sealed_header(header, &packet);
    packet.head_bytes = uint16_t(kHeaderBytes + write_open(offer(), packet.head.data() + kHeaderBytes));
    if (options_.authenticate) seal(open_key_, 0, &packet);
    ++counters_.packets_sent;
  };
  for (uint16_t p = 0; p < path_count_ && open_acks_due_ != 0 && count < packets.size(); ++p) {
    if (!(open_acks_due_ >> p & 1)) continue;
    open_acks_due_ &= uint8_t(~(1u << p));
    put(Type::open_ack, p);
  }
  if (!opens_due(now_ns)) return count;
  for (uint16_t p = 0; p < path_count_ && count < packets.size(); ++p)
    if (!paths_[p].known) put(Type::open, p);
  ++open_tries_;
  open_ns_ = now_ns + std::min(kFirstOpenNs << std::min(open_tries_, 8u), kLongestOpenNs);
  return count;
}

bool Session::opens_due(uint64_t now_ns) const {
  if (!identity_.opener || now_ns < open_ns_) return false;
  if (state_ == State::opening) return true;
  if (state_ != State::open || open_tries_ >= kPathTries) return false;
  for (int p = 0; p < path_count_; ++p)
    if (!paths_[p].known) return true;
  return false;
}

bool Session::grants_waiting() const {
  if (identity_.mode == Mode::stream) return stream_.limit() > announced_;
  return incoming_.posted() > std::max(announced_, incoming_.oldest());  // what is done needs no grant
}

size_t Session::transmit_control(std::span<TxPacket> packets, uint64_t now_ns) {
  size_t count = 0;
  if (close_due_ && count < packets.size()) transmit_close(&packets[count++], now_ns);
  while (grant_due_ && count < packets.size() && !sent_.full()) {
    if (state_ == State::open && grants_waiting()) transmit_grant(&packets[count++], now_ns);
    if (state_ != State::open || !grants_waiting()) {
      grant_due_ = false;
      grant_ns_ = kNever;
    }
  }
  if (probe_due_ && count < packets.size() && !sent_.full()) {
    probe_due_ = false;
    if (state_ == State::open) {
      Header header;
      begin(&packets[count], Type::probe, 0, choose_path(now_ns), &header);
      send_packet(&header, &packets[count++], {.content = Content::probe}, 0, now_ns);
    }
  }
  return count;
}

size_t Session::write_ack_body(uint8_t* to, uint64_t now_ns) {
  AckBody ack;
  received_.ranges(&ack);
  ack.delay_ns = now_ns - std::min(now_ns, largest_received_ns_);
  ack_due_ = false;
  ack_ns_ = kNever;
  unacknowledged_ = 0;
  ++counters_.acks_sent;
  return write_ack(ack, to);
}

void Session::transmit_ack(TxPacket* packet, uint64_t now_ns) {
  // A grant that waits for an acknowledgement rides on it.
  const bool rides = identity_.mode == Mode::message && grant_ns_ != kNever;
  if (state_ == State::open && grants_waiting() && rides) return transmit_grant(packet, now_ns);
  Header header;
  begin(packet, Type::ack, 0, reply_path_, &header);
  const size_t bytes = write_ack_body(packet->head.data() + kHeaderBytes, now_ns);
  send_packet(&header, packet, {}, bytes, now_ns);
}

void Session::transmit_grant(TxPacket* packet, uint64_t now_ns) {
  Header header;
  begin(packet, Type::grant, 0, reply_path_, &header);
  uint8_t* body = packet->head.data() + kHeaderBytes;
  SentPacket sent{.message = announced_, .content = Content::grant};
  size_t bytes;
  if (identity_.mode == Mode::stream) {
    header.flags |= kStream;
    announced_ = stream_.limit();
    bytes = write_credit({uint32_t(announced_)}, body);
  } else {
    GrantBody grant;
    announced_ = std::max(announced_, incoming_.oldest());
    grant.first = uint16_t(announced_);
    for (; announced_ < incoming_.posted() && grant.count < kMostGrants; ++announced_)
      grant.capacity[grant.count++] = incoming_.capacity(announced_);
    bytes = write_grant(grant, body);
  }
  if (!grants_waiting()) {
    grant_due_ = false;
    grant_ns_ = kNever;
  }
  if (unacknowledged_ > 0 || ack_due_) {
    header.flags |= kWithAck;
    bytes += write_ack_body(body + bytes, now_ns);
  }
  send_packet(&header, packet, sent, bytes, now_ns);
}

void Session::transmit_close(TxPacket* packet, uint64_t now_ns) {
  close_due_ = false;
  Header header;
  begin(packet, Type::close, 0, reply_path_, &header);
  uint8_t* body = packet->head.data() + kHeaderBytes;
  size_t bytes = write_close(close_body_, body);
  if (received_.any()) {  // the last news of what has arrived, in case an acknowledgement was lost
    header.flags |= kWithAck;
    bytes += write_ack_body(body + bytes, now_ns);
  }
  send_packet(&header, packet, {.content = Content::close}, bytes, now_ns);
}

// The lesser filled of two paths taken at random (power of two choices); a resting one only if all rest.
uint16_t Session::choose_path(uint64_t now_ns) {
  if (path_count_ == 1) return 0;
  if (path_burst_ > 0 && paths_[path_].known && paths_[path_].rest_until_ns <= now_ns) {
    --path_burst_;
    return path_;
  }
  path_burst_ = kPathBurst - 1;
  std::array<uint16_t, kMostPaths> usable;
  uint32_t count = 0;
  for (int p = 0; p < path_count_; ++p)
    if (paths_[p].known && paths_[p].rest_until_ns <= now_ns) usable[count++] = uint16_t(p);
  for (int p = 0; count == 0 && p < path_count_; ++p)
    if (paths_[p].known) usable[count++] = uint16_t(p);
  if (count == 0) return 0;
  choice_ = choice_ * 6364136223846793005u + 1442695040888963407u;  // Knuth's MMIX generator
  const uint16_t one = usable[(choice_ >> 33) % count], other = usable[(choice_ >> 48) % count];
  return path_ = paths_[one].in_flight <= paths_[other].in_flight ? one : other;
}

size_t Session::transmit_data(std::span<TxPacket> packets, uint64_t now_ns) {
  size_t count = 0;
  const uint32_t window = this->window();
  for (; count < packets.size() && !sent_.full(); ++count) {
    if (in_flight_ >= window && beyond_window_ == 0) {
      limited_ = true;
      return count;
    }
    const std::optional<Outgoing::Segment> segment = outgoing_.next();
    if (!segment) {
      limited_ = false;
      beyond_window_ = 0;
      return count;
    }
    TxPacket& packet = packets[count];
    Header header;
    begin(&packet, Type::data, 0, choose_path(now_ns), &header);
    outgoing_.fill(*segment, &header, &packet);
    counters_.retransmitted += outgoing_.was_lost();
    counters_.bytes_sent += packet.payload_bytes;
    outgoing_.taken(*segment);
    send_packet(&header, &packet, {.message = segment->message, .segment = segment->index, .content = Content::data}, 0,
                now_ns);
    if (beyond_window_ > 0) --beyond_window_;
  }
  return count;
}

bool Session::wants_to_transmit(uint64_t now_ns) {
  if (finished_ || state_ == State::closed) return false;
  if (open_acks_due_ != 0 || opens_due(now_ns)) return true;
  if (peer_id_ == 0 || (state_ == State::opening && identity_.opener)) return false;
  if (close_due_ || ack_due_ || ((grant_due_ || probe_due_) && !sent_.full())) return true;
  return state_ == State::open && (in_flight_ < window() || beyond_window_ > 0) && !sent_.full() && outgoing_.ready();
}

}  // namespace harp
