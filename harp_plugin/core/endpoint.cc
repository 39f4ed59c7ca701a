#include "harp_plugin/core/endpoint.h"

#include <algorithm>

#include "harp_plugin/core/session.h"

namespace harp {

namespace {

constexpr uint32_t kSlotBits = 16;  // of an id: where its session is; the other bits are random
// RESETs that strays are answered with, as hosts limit ICMP (RFC 1812, 4.3.2.8): so many at once, then one each time.
constexpr size_t kMostResets = 32;
constexpr uint64_t kResetEveryNs = 100 * kMillisecond;
constexpr uint64_t kIdleLookNs = 50 * kMillisecond;  // how often sessions with nothing under way are looked at
constexpr uint64_t kPauseNs = 100 * kMillisecond;    // of this process, that is not counted against peers

uint32_t slot_of(ConnectionId id) { return id & ((1u << kSlotBits) - 1); }

}  // namespace

Endpoint::Endpoint(Options options, std::function<uint64_t()> random)
    : options_(std::move(options)), random_(std::move(random)) {
  if (options_.authenticate) options_.cookie = cookie_of(options_.secret);
}
Endpoint::~Endpoint() = default;

Session* Endpoint::find(ConnectionId id) const {
  const uint32_t slot = slot_of(id);
  if (slot >= sessions_.size() || !sessions_[slot] || sessions_[slot]->identity().id != id) return nullptr;
  return sessions_[slot].get();
}

Session* Endpoint::awake(ConnectionId id) {
  expected_holds_ = false;
  Session* const session = find(id);
  if (session) wake(session);
  return session;
}

void Endpoint::wake(Session* session) {
  if (!session->in_idle_list) return;
  unlink(session);
  link(session, false);
}

std::vector<Session*>& Endpoint::list_of(const Session* session) { return session->in_idle_list ? idle_ : active_; }

void Endpoint::link(Session* session, bool into_idle) {
  session->in_idle_list = into_idle;
  session->place = list_of(session).size();
  list_of(session).push_back(session);
}

void Endpoint::unlink(Session* session) {
  std::vector<Session*>& list = list_of(session);
  list[session->place] = list.back();
  list[session->place]->place = session->place;
  list.pop_back();
}

Session* Endpoint::add(const Nonce& nonce, Mode mode, bool opener, uint64_t now_ns) {
  if (free_slots_.empty()) {
    if (sessions_.size() == size_t(1) << kSlotBits) return nullptr;
    free_slots_.push_back(uint32_t(sessions_.size()));
    sessions_.emplace_back();
  }
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  uint32_t id = 0;
  while (id >> kSlotBits == 0) id = uint32_t(random_()) << kSlotBits | slot;
  const uint64_t first = options_.first_number ? *options_.first_number : random_() >> 33;
  sessions_[slot] =
      std::make_unique<Session>(Session::Identity{id, nonce, mode, opener, first}, options_, events_, now_ns);
  link(sessions_[slot].get(), false);
  return sessions_[slot].get();
}

void Endpoint::remove(Session* session) {
  expected_holds_ = false;
  if (latest_ == session) latest_ = nullptr;
  const uint32_t slot = slot_of(session->identity().id);
  sessions_[slot].reset();
  free_slots_.push_back(slot);
}

bool Endpoint::refuse(ConnectionId id, uint64_t request) {  // there is no such connection (any more)
  events_.tell(event::Completed{id, {request, Status::cancelled, 0}});
  return true;
}

Nonce Endpoint::listen() {
  Nonce nonce;
  const uint64_t halves[2] = {random_(), random_()};
  std::memcpy(nonce.data(), halves, sizeof halves);
  listeners_.push_back(nonce);
  return nonce;
}

void Endpoint::stop_listening(const Nonce& nonce) { std::erase(listeners_, nonce); }

ConnectionId Endpoint::connect(const Address& address, const Nonce& nonce, Mode mode, uint64_t now_ns) {
  Session* session = add(nonce, mode, true, now_ns);
  if (!session) return 0;
  session->connect_to(address);
  return session->identity().id;
}

bool Endpoint::send(ConnectionId id, const uint8_t* data, uint32_t bytes, uint64_t request, uint64_t now_ns) {
  Session* session = awake(id);
  return session ? session->send(data, bytes, request, now_ns) : refuse(id, request);
}

bool Endpoint::receive(ConnectionId id, uint8_t* to, uint32_t capacity, uint64_t request, uint64_t now_ns) {
  Session* session = awake(id);
  return session ? session->post(to, capacity, request, now_ns) : refuse(id, request);
}

void Endpoint::consume(ConnectionId id, uint32_t records, uint64_t now_ns) {
  if (Session* session = awake(id)) session->consume(records, now_ns);
}

void Endpoint::close(ConnectionId id, uint64_t now_ns) {
  if (Session* session = awake(id)) session->close(now_ns);
}

void Endpoint::fail(ConnectionId id, Status status, const std::string& why) {
  if (Session* session = awake(id)) session->fail(status, why);
}

uint32_t Endpoint::record_bytes(ConnectionId id) const {
  const Session* session = find(id);
  return session ? session->payload() : 0;
}

Mode Endpoint::mode(ConnectionId id) const { return find(id)->identity().mode; }

bool Endpoint::receive(const RxPacket& came, uint64_t now_ns) {
  std::optional<Packet> packet = read_packet(came);
  if (!packet) {
    ++strays_.malformed;
    return false;
  }
  Header& header = packet->header;
  if (options_.authenticate) {
    if ((header.path & ~kPathNumber) != options_.cookie) {
      ++strays_.unauthenticated;
      return false;
    }
    header.path &= kPathNumber;
  }
  if (header.type >= Type::reset) {
    header.type == Type::reset ? on_reset(*packet) : on_open_packet(*packet, now_ns);
    return false;
  }
  Session* session = awake(header.conn);
  if (!session || session->state() == State::closed) {
    on_stray(*packet, now_ns);
    return false;
  }
  if (header.type == Type::data) latest_ = session;
  return session->receive(*packet, now_ns);
}

// A peer that was started anew is told so. With authentication nobody believes a RESET, so none is sent.
void Endpoint::on_stray(const Packet& packet, uint64_t now_ns) {
  ++strays_.out_of_window;
  if (packet.header.type == Type::ack || options_.authenticate) return;
  const uint64_t due_ns = std::max(resets_due_ns_, now_ns);
  if (due_ns - now_ns >= kMostResets * kResetEveryNs) return;
  resets_due_ns_ = due_ns + kResetEveryNs;
  resets_.push_back({packet.came.from, packet.came.local, packet.header.conn, packet.header.number});
}

// OPEN and OPEN_ACK carry a tag under a key that nobody can make without the secret.
bool Endpoint::authentic(const Packet& packet, const Nonce& nonce) const {
  return !options_.authenticate ||
         verify(opening_key(options_.secret, nonce), 0, {packet.came.head, kHeaderBytes}, packet.body);
}

void Endpoint::on_open_packet(const Packet& packet, uint64_t now_ns) {
  std::span<const uint8_t> bytes = packet.body;
  const bool is_tagged = packet.header.flags & kTagged;
  if (is_tagged != options_.authenticate || (is_tagged && bytes.size() < kTagBytes)) {
    ++strays_.unauthenticated;
    return;
  }
  if (is_tagged) bytes = bytes.first(bytes.size() - kTagBytes);
  const std::optional<OpenBody> body = read_open(bytes);
  if (!body) {
    ++strays_.malformed;
    return;
  }
  packet.header.type == Type::open ? on_open(packet, *body, now_ns) : on_open_ack(packet, *body, now_ns);
}

void Endpoint::on_open(const Packet& packet, const OpenBody& body, uint64_t now_ns) {
  // Nothing is computed for a stranger, who does not know a nonce.
  if (std::find(listeners_.begin(), listeners_.end(), body.nonce) == listeners_.end()) {
    ++strays_.out_of_window;
    return;
  }
  if (!authentic(packet, body.nonce)) {
    ++strays_.unauthenticated;
    return;
  }
  for (const auto& session : sessions_) {
    if (!session || !session->opened_by(body)) continue;
    wake(session.get());
    return session->accept(body, packet);  // once more, or on a further path
  }
  if (Session* session = add(body.nonce, body.mode, false, now_ns)) session->accept(body, packet);
}

void Endpoint::on_open_ack(const Packet& packet, const OpenBody& body, uint64_t now_ns) {
  Session* session = find(packet.header.conn);
  if (!session || session->identity().nonce != body.nonce || session->identity().mode != body.mode ||
      !session->knows(packet.came.from)) {
    ++strays_.out_of_window;
  } else if (!authentic(packet, body.nonce)) {
    ++strays_.unauthenticated;
  } else {
    wake(session);
    session->answered(body, packet, now_ns);
  }
}

void Endpoint::on_reset(const Packet& packet) {
  for (const auto& session : sessions_)
    if (session && session->peer_id() == packet.header.conn && session->knows(packet.came.from)) {
      wake(session.get());
      expected_holds_ = false;
      return session->reset_by_peer(packet.header.number);
    }
  ++strays_.out_of_window;
}

std::span<const Expected> Endpoint::expected() {
  if (!expected_holds_) expected_count_ = latest_ ? latest_->incoming().expect(expected_) : 0;
  expected_holds_ = true;
  return std::span(expected_).first(expected_count_);
}

size_t Endpoint::transmit(std::span<TxPacket> packets, uint64_t now_ns) {
  size_t count = 0;
  // Each is first by turns, so that under load all are served alike.
  for (size_t i = 0; i < active_.size() && count < packets.size(); ++i)
    count += active_[(turn_ + i) % active_.size()]->transmit(packets.subspan(count), now_ns);
  ++turn_;
  return count + transmit_resets(packets.subspan(count));
}

size_t Endpoint::transmit_resets(std::span<TxPacket> packets) {
  size_t count = 0;
  resets_sent_.clear();
  for (; !resets_.empty() && count < packets.size(); ++count) {
    resets_sent_.push_back(resets_.back());
    resets_.pop_back();
  }
  for (size_t i = 0; i < count; ++i) {  // the addresses stay where they are now
    const Reset& reset = resets_sent_[i];
    TxPacket& packet = packets[i];
    packet.payload = nullptr;
    packet.payload_bytes = 0;
    packet.tagged = false;
    packet.to = &reset.to;
    packet.local = reset.local;
    packet.head_bytes = kHeaderBytes;
    write_header({.type = Type::reset, .conn = reset.conn, .number = reset.number}, packet.head.data());
  }
  return count;
}

void Endpoint::advance(uint64_t now_ns) {
  // Woken much later than was asked for: this process was stopped, or had no core.
  uint64_t pause_ns = 0;
  const uint64_t expected_ns = std::max(promised_ns_, advanced_ns_);
  if (advanced_ns_ != 0 && now_ns > expected_ns + kPauseNs) pause_ns = now_ns - expected_ns;
  advanced_ns_ = now_ns;
  if (pause_ns > 0) idle_look_ns_ = 0;
  if (idle_look_ns_ <= now_ns) {
    run_timers(&idle_, now_ns, pause_ns);
    idle_look_ns_ = now_ns + kIdleLookNs;
  }
  run_timers(&active_, now_ns, pause_ns);
  promised_ns_ = 0;
}

// Runs the timers of these sessions, and moves each to the list that it now belongs to.
void Endpoint::run_timers(std::vector<Session*>* list, uint64_t now_ns, uint64_t pause_ns) {
  for (size_t i = 0; i < list->size();) {
    Session* session = (*list)[i];
    if (pause_ns > 0) session->forgive(pause_ns, now_ns);
    if (now_ns >= session->deadline_ns()) {
      expected_holds_ = false;
      session->advance(now_ns);
    }
    const bool is_idle = session->idle(now_ns);
    if (is_idle == session->in_idle_list && !session->finished()) {
      ++i;
      continue;
    }
    unlink(session);
    if (session->finished()) {
      remove(session);
    } else {
      link(session, is_idle);
    }
  }
}

// Sessions with nothing under way wait for the next look at all of them, so that many share a wake-up.
uint64_t Endpoint::next_ns() {
  uint64_t first = UINT64_MAX;
  for (Session* session : idle_) first = std::min(first, session->deadline_ns());
  first = std::max(first, idle_look_ns_);
  for (Session* session : active_) first = std::min(first, session->deadline_ns());
  promised_ns_ = first == UINT64_MAX ? 0 : first;
  return first;
}

bool Endpoint::wants_to_transmit(uint64_t now_ns) const {
  if (!resets_.empty()) return true;
  for (Session* session : active_)
    if (session->wants_to_transmit(now_ns)) return true;
  return false;
}

const Counters* Endpoint::counters(ConnectionId id) const {
  Session* session = find(id);
  return session ? &session->counters() : nullptr;
}

}  // namespace harp
