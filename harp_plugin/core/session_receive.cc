// What a connection does with the packets that come.
#include "harp_plugin/core/session.h"

namespace harp {

namespace {

constexpr uint64_t kFarAhead = 1 << 16;  // numbers beyond the highest so far that are believed
constexpr uint32_t kMostReordering = 64;
constexpr uint32_t kMostKept = 512;  // packets that the streams of an endpoint keep; beyond, records are copied

bool needs_acknowledgement(Type type) { return type != Type::ack; }

}  // namespace

bool Session::receive(Packet& packet, uint64_t now_ns) {
  const Header& header = packet.header;
  if (peer_id_ == 0 || state_ == State::closed) return false;
  const uint64_t number = expand(header.number, received_.expected());
  if (header.path >= path_count_ || !paths_[header.path].known || packet.came.from != paths_[header.path].to ||
      number >= received_.expected() + kFarAhead) {
    ++counters_.out_of_window;
    return false;
  }
  if (bool(header.flags & kTagged) != options_.authenticate ||
      (options_.authenticate && !verify(key_, number, {packet.came.head, kHeaderBytes}, packet.body))) {
    ++counters_.unauthenticated;
    return false;
  }
  if (options_.authenticate) packet.body = packet.body.first(packet.body.size() - kTagBytes);
  if (received_.contains(number)) {
    ++counters_.duplicates;
    return false;
  }
  if (state_ == State::opening) {  // its sender has heard OPEN_ACK; a record must not come before the connection does
    state_ = State::open;
    events_.tell(event::Opened{identity_.id, identity_.nonce, packet.came.from});
  }
  const bool is_record = header.type == Type::data && identity_.mode == Mode::stream;
  const bool keep = is_record && packet.came.lendable && events_.kept < kMostKept;
  const bool in_order = number == received_.expected();
  const Arrival arrival = header.type == Type::data ? on_data(packet, keep) : on_control(packet, now_ns);
  if (arrival == Arrival::refused) return false;
  if (arrival == Arrival::duplicate) ++counters_.duplicates;
  if (number >= received_.expected()) largest_received_ns_ = now_ns;
  received_.insert(number);
  ++counters_.packets_received;
  if (data_lost_ns_ != kNever && now_ns >= heard_ns_ + kSilenceNs) data_lost_ns_ = now_ns;  // nothing got through
  heard_ns_ = now_ns;
  reply_path_ = header.path;
  if (needs_acknowledgement(header.type)) acknowledge_later(header, in_order, now_ns);
  return keep && arrival == Arrival::accepted;
}

Arrival Session::on_data(const Packet& packet, bool keep) {
  Arrival arrival = Arrival::refused;
  if (identity_.mode == Mode::stream) {
    if (told_) return Arrival::refused;
    arrival = stream_.arrive(packet, keep);
    events_.kept += keep && arrival == Arrival::accepted;
    while (const std::optional<Record> record = stream_.deliver()) {
      ++counters_.messages_received;
      events_.tell(event::Received{identity_.id, *record});
    }
  } else if (expand(packet.header.message, incoming_.posted()) >= closed_floor_) {
    return Arrival::refused;  // was given up: the peer must not take it for delivered
  } else {
    std::optional<Completion> done;
    arrival = incoming_.arrive(packet, &counters_.placed, &done);
    // A sender of large messages waits for the end of each; small ones are acknowledged together.
    if (done && packet.header.total > options_.eager_bytes) ack_due_ = true;
    if (done) received(*done);
  }
  if (arrival == Arrival::refused) ++counters_.out_of_buffer;
  if (arrival == Arrival::accepted) counters_.bytes_received += packet.body.size();
  return arrival;
}

void Session::received(const Completion& done) {
  ++counters_.messages_received;
  complete(done);
}

Arrival Session::on_control(const Packet& packet, uint64_t now_ns) {
  Arrival arrival = Arrival::refused;
  switch (packet.header.type) {
    case Type::ack: arrival = on_ack(packet.body, now_ns); break;
    case Type::grant: arrival = on_grant(packet, now_ns); break;
    case Type::probe: arrival = packet.body.empty() ? Arrival::accepted : Arrival::refused; break;
    case Type::close: arrival = on_close(packet, now_ns); break;
    case Type::data:
    case Type::reset:
    case Type::open:
    case Type::open_ack: break;  // somebody else's business
  }
  if (arrival == Arrival::refused) ++counters_.malformed;
  return arrival;
}

Arrival Session::on_ack(std::span<const uint8_t> bytes, uint64_t now_ns) {
  const std::optional<AckBody> ack = read_ack(bytes, sent_.next());
  if (!ack || ack->ranges[0].last >= sent_.next()) return Arrival::refused;
  ++counters_.acks_received;
  uint32_t packets = 0;
  uint64_t rtt_ns = 0;
  for (uint32_t r = 0; r < ack->count; ++r) {
    const Range range = ack->ranges[r];
    for (uint64_t number = std::max(range.first, sent_.oldest()); number <= range.last; ++number) {
      SentPacket& packet = sent_.at(number);
      if (packet.fate == SentPacket::Fate::settled) continue;
      if (packet.fate != SentPacket::Fate::in_flight) {
        ++counters_.spurious;
        if (packet.fate == SentPacket::Fate::lost) {
          // Packets overtake each other by more than was thought.
          reordering_ = std::min(reordering_ * 2, kMostReordering);
        } else {
          congestion_.late_only();
        }
      } else {
        ++packets;
        --in_flight_;
        --paths_[packet.path].in_flight;
        if (number == ack->ranges[0].last) {
          const uint64_t waited = std::min(ack->delay_ns, now_ns - packet.sent_ns);
          rtt_ns = std::max<uint64_t>(1, now_ns - packet.sent_ns - waited);
        }
      }
      acknowledged(packet);
    }
  }
  if (rtt_ns > 0) rtt_.sample(rtt_ns);
  if (packets > 0) {
    if (data_lost_ns_ == kNever) backoff_ = 0;
    timeout_base_ns_ = now_ns;
    congestion_.acked(packets, rtt_ns, now_ns, limited_);
  }
  largest_acked_ = std::max(largest_acked_, ack->ranges[0].last + 1);
  detect_losses(now_ns);
  sent_.settle(now_ns - std::min(now_ns, 4 * rtt_.smoothed_ns()));
  return Arrival::accepted;
}

void Session::acknowledged(SentPacket& packet) {
  packet.fate = SentPacket::Fate::settled;
  Path& path = paths_[packet.path];
  path.timeouts = 0;
  path.newest_acked = std::max(path.newest_acked, packet.path_sequence + 1);
  newest_acked_sent_ns_ = std::max(newest_acked_sent_ns_, packet.sent_ns);
  if (packet.content == Content::close) linger_ns_ = 0;
  if (packet.content != Content::data) return;
  data_lost_ns_ = kNever;
  outgoing_.acknowledged({packet.message, packet.segment}, [this](const Completion& done) {
    ++counters_.messages_sent;
    complete(done);
  });
}

// A packet is lost when enough later ones of its path have arrived, or one that was sent long enough after it.
void Session::detect_losses(uint64_t now_ns) {
  loss_ns_ = kNever;
  uint32_t lost = 0;
  const uint64_t late_ns = rtt_.reordering_ns();
  for (uint64_t number = sent_.oldest(); number < largest_acked_; ++number) {
    SentPacket& packet = sent_.at(number);
    if (packet.fate != SentPacket::Fate::in_flight) continue;
    const Path& path = paths_[packet.path];
    if (path.newest_acked >= packet.path_sequence + 1 + reordering_ ||
        (packet.sent_ns <= newest_acked_sent_ns_ && packet.sent_ns + late_ns <= now_ns)) {
      lost += packet.content == Content::data;
      lose(packet, SentPacket::Fate::lost, now_ns);
    } else if (packet.sent_ns <= newest_acked_sent_ns_) {
      loss_ns_ = std::min(loss_ns_, packet.sent_ns + late_ns);
    }
  }
  if (lost > 0) congestion_.lost(lost, now_ns);
}

void Session::lose(SentPacket& packet, SentPacket::Fate fate, uint64_t now_ns) {
  packet.fate = fate;
  --in_flight_;
  --paths_[packet.path].in_flight;
  ++counters_.lost;
  switch (packet.content) {
    case Content::data:
      if (!outgoing_.awaits({packet.message, packet.segment})) break;  // one that was thought lost has come
      data_lost_ns_ = std::min(data_lost_ns_, now_ns);
      outgoing_.lost({packet.message, packet.segment});
      break;
    case Content::grant:
      announced_ = std::min(announced_, packet.message);
      grant_due_ = true;
      break;
    case Content::probe: probe_due_ = true; break;
    case Content::close: close_due_ = state_ == State::closing; break;
    case Content::nothing: break;
  }
}

Arrival Session::on_grant(const Packet& packet, uint64_t now_ns) {
  const std::span<const uint8_t> body = packet.body;
  size_t used = 0;
  if (bool(packet.header.flags & kStream) != (identity_.mode == Mode::stream)) return Arrival::refused;
  if (identity_.mode == Mode::stream) {
    const std::optional<CreditBody> credit = read_credit(body, &used);
    if (!credit) return Arrival::refused;
    const uint64_t limit = expand(credit->limit, outgoing_.submitted());
    if (limit > outgoing_.submitted() + UINT16_MAX) return Arrival::refused;
    outgoing_.credit(limit);
  } else {
    const std::optional<GrantBody> grant = read_grant(body, &used);
    if (!grant) return Arrival::refused;
    const uint64_t first = expand(grant->first, outgoing_.submitted());
    for (uint32_t i = 0; i < grant->count; ++i) outgoing_.grant(first + i, grant->capacity[i]);
  }
  if (packet.header.flags & kWithAck) return on_ack(body.subspan(used), now_ns);
  return used == body.size() ? Arrival::accepted : Arrival::refused;
}

Arrival Session::on_close(const Packet& packet, uint64_t now_ns) {
  const std::span<const uint8_t> bytes = packet.body;
  if (bytes.size() < kCloseBytes) return Arrival::refused;
  const std::optional<CloseBody> close = read_close(bytes.first(kCloseBytes));
  if (!close) return Arrival::refused;
  if (packet.header.flags & kWithAck) {
    if (on_ack(bytes.subspan(kCloseBytes), now_ns) == Arrival::refused) return Arrival::refused;
  } else if (bytes.size() != kCloseBytes) {
    return Arrival::refused;
  }
  if (peer_closed_) return Arrival::accepted;
  peer_closed_ = true;
  if (state_ == State::closing) {  // both did: nothing is left to say but the acknowledgement
    linger_ns_ = now_ns + timeout_ns();
    return Arrival::accepted;
  }
  state_ = State::closing;
  abandon_packets();
  over_ = close->reason == CloseReason::done ? Status::peer_closed : Status::peer_failed;
  fail_requests(over_);
  tell_failed(over_, close->reason == CloseReason::done ? "it has closed the connection"
                                                        : "it closed the connection and gave up what was under way");
  return Arrival::accepted;
}

void Session::acknowledge_later(const Header& header, bool in_order, uint64_t now_ns) {
  ++unacknowledged_;
  const bool rare = header.type == Type::probe || header.type == Type::close;
  if (unacknowledged_ >= options_.ack_every || !in_order || rare) {
    ack_due_ = true;
  } else if (ack_ns_ == kNever) {
    ack_ns_ = now_ns + options_.ack_delay_ns;
  }
}

}  // namespace harp
