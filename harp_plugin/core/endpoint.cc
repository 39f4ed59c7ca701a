#include "harp_plugin/core/endpoint.h"

#include <algorithm>
#include <map>
#include <vector>

#include "harp_plugin/core/session.h"

namespace harp {

namespace {

constexpr uint32_t kSlotBits = 16;  // of an id: where its session is; the other bits are random
// RESETs that strays are answered with, as hosts limit ICMP (RFC 1812, 4.3.2.8): so many at once, then one each time.
constexpr size_t kMostResets = 32;
constexpr uint64_t kResetEveryNs = 100 * kMillisecond;
constexpr uint64_t kIdleLookNs = 50 * kMillisecond;  // how often sessions with nothing under way are looked at
constexpr uint64_t kPauseNs = 100 * kMillisecond;    // of this process, that is not counted against peers
constexpr uint32_t kMostKept = 512;  // packets that streams keep; beyond, records are copied

struct Reset {
  Address to;
  uint16_t local;
  uint32_t conn, number;
};

}  // namespace

struct Endpoint::Impl {
  Options options;
  Events& owner;
  std::function<uint64_t()> random;
  std::vector<std::unique_ptr<Session>> sessions;  // by the low bits of their ids
  std::vector<uint32_t> free_slots;
  std::vector<Session*> active;   // that have something to do soon
  std::vector<Session*> idle;     // the others
  std::vector<Nonce> listeners;
  std::vector<Reset> resets, resets_sent;  // to be sent; those handed out last, whose addresses are still read
  uint64_t resets_due_ns = 0;  // if they were sent one each time, the next one would be
  Counters strays;
  Session* latest = nullptr;  // that data came for
  uint32_t kept = 0;
  uint64_t changes = 0;
  size_t turn = 0;            // which active session transmits first
  uint64_t idle_look_ns = 0, promised_ns = 0, advanced_ns = 0;

  // Counts what is kept, and passes on the rest.
  struct Counting : Events {
    explicit Counting(Impl& i) : impl(i) {}
    void opened(ConnectionId id, const Nonce* nonce) override { impl.owner.opened(id, nonce); }
    void completed(ConnectionId id, const Completion& done) override { impl.owner.completed(id, done); }
    void record(ConnectionId id, const Record& record) override { impl.owner.record(id, record); }
    void failed(ConnectionId id, Status status, const std::string& why) override { impl.owner.failed(id, status, why); }
    void release(const RxPacket& packet) override {
      --impl.kept;
      impl.owner.release(packet);
    }
    Impl& impl;
  } events{*this};

  Impl(Options o, Events& e, std::function<uint64_t()> r) : options(std::move(o)), owner(e), random(std::move(r)) {
    if (options.authenticate) options.cookie = cookie_of(options.secret);
  }

  Session* find(ConnectionId id) {
    const uint32_t slot = id & ((1u << kSlotBits) - 1);
    if (slot >= sessions.size() || !sessions[slot] || sessions[slot]->identity().id != id) return nullptr;
    return sessions[slot].get();
  }
  Session* add(const Nonce& nonce, Mode mode, bool opener, uint64_t now_ns) {
    if (free_slots.empty()) {
      if (sessions.size() == size_t(1) << kSlotBits) return nullptr;
      free_slots.push_back(uint32_t(sessions.size()));
      sessions.emplace_back();
    }
    const uint32_t slot = free_slots.back();
    free_slots.pop_back();
    uint32_t id = 0;
    while (id >> kSlotBits == 0) id = uint32_t(random()) << kSlotBits | slot;
    const uint64_t first = options.first_number ? *options.first_number : random() >> 33;
    sessions[slot] =
        std::make_unique<Session>(Session::Identity{id, nonce, mode, opener, first}, options, events, now_ns);
    link(sessions[slot].get(), false);
    return sessions[slot].get();
  }
  std::vector<Session*>& list_of(const Session* session) { return session->in_idle_list ? idle : active; }
  void link(Session* session, bool into_idle) {
    session->in_idle_list = into_idle;
    session->place = list_of(session).size();
    list_of(session).push_back(session);
  }
  void unlink(Session* session) {
    std::vector<Session*>& list = list_of(session);
    list[session->place] = list.back();
    list[session->place]->place = session->place;
    list.pop_back();
  }
  void wake(Session* session) {
    if (!session->in_idle_list) return;
    unlink(session);
    link(session, false);
  }
  bool refuse(ConnectionId id, uint64_t request) {  // there is no such connection (any more)
    owner.completed(id, {request, Status::cancelled, 0});
    return true;
  }
  void remove(Session* session) {
    ++changes;
    if (latest == session) latest = nullptr;
    const uint32_t slot = session->identity().id & ((1u << kSlotBits) - 1);
    sessions[slot].reset();
    free_slots.push_back(slot);
  }
  void on_open(const Header&, const OpenBody&, const RxPacket&, uint64_t now_ns);
  void on_open_packet(const Header&, const RxPacket&, uint64_t now_ns);
  void on_reset(const Header&, const RxPacket&);
  void on_stray(const Header&, const RxPacket&, uint64_t now_ns);
  bool authentic(const RxPacket&, const Nonce&) const;
  size_t transmit_resets(std::span<TxPacket>);
  void run_timers(std::vector<Session*>* list, uint64_t now_ns, uint64_t pause_ns);
};

Endpoint::Endpoint(Options options, Events& events, std::function<uint64_t()> random)
    : impl_(std::make_unique<Impl>(std::move(options), events, std::move(random))) {}
Endpoint::~Endpoint() = default;

Nonce Endpoint::listen() {
  Nonce nonce;
  const uint64_t halves[2] = {impl_->random(), impl_->random()};
  std::memcpy(nonce.data(), halves, sizeof halves);
  impl_->listeners.push_back(nonce);
  return nonce;
}

void Endpoint::stop_listening(const Nonce& nonce) { std::erase(impl_->listeners, nonce); }

ConnectionId Endpoint::connect(const Address& address, const Nonce& nonce, Mode mode, uint64_t now_ns) {
  ++impl_->changes;
  Session* session = impl_->add(nonce, mode, true, now_ns);
  if (!session) return 0;
  session->connect_to(address);
  return session->identity().id;
}

bool Endpoint::send(ConnectionId id, const uint8_t* data, uint32_t bytes, uint64_t request, uint64_t now_ns) {
  ++impl_->changes;
  Session* session = impl_->find(id);
  if (!session) return impl_->refuse(id, request);
  impl_->wake(session);
  return session->send(data, bytes, request, now_ns);
}

bool Endpoint::receive(ConnectionId id, uint8_t* to, uint32_t capacity, uint64_t request, uint64_t now_ns) {
  ++impl_->changes;
  Session* session = impl_->find(id);
  if (!session) return impl_->refuse(id, request);
  impl_->wake(session);
  return session->post(to, capacity, request, now_ns);
}

void Endpoint::consume(ConnectionId id, uint32_t records, uint64_t now_ns) {
  ++impl_->changes;
  Session* session = impl_->find(id);
  if (!session) return;
  impl_->wake(session);
  session->consume(records, now_ns);
}

uint32_t Endpoint::record_bytes(ConnectionId id) const {
  const Session* session = impl_->find(id);
  return session ? session->payload() : 0;
}

Mode Endpoint::mode(ConnectionId id) const { return impl_->find(id)->identity().mode; }

void Endpoint::close(ConnectionId id, uint64_t now_ns) {
  ++impl_->changes;
  Session* session = impl_->find(id);
  if (!session) return;
  impl_->wake(session);
  session->close(now_ns);
}

void Endpoint::fail(ConnectionId id, Status status, const std::string& why) {
  ++impl_->changes;
  Session* session = impl_->find(id);
  if (!session) return;
  impl_->wake(session);
  session->fail(status, why);
}

bool Endpoint::receive(const RxPacket& packet, uint64_t now_ns) {
  ++impl_->changes;
  std::optional<Header> header = read_header({packet.head, packet.head_bytes});
  if (!header || !body_of(packet)) {
    ++impl_->strays.malformed;
    return false;
  }
  if (impl_->options.authenticate) {
    if ((header->path & ~kPathNumber) != impl_->options.cookie) {
      ++impl_->strays.unauthenticated;
      return false;
    }
    header->path &= kPathNumber;
  }
  if (header->type >= Type::reset) {
    if (header->type == Type::reset) {
      impl_->on_reset(*header, packet);
    } else {
      impl_->on_open_packet(*header, packet, now_ns);
    }
    return false;
  }
  Session* session = impl_->find(header->conn);
  if (!session || session->state() == State::closed) {
    impl_->on_stray(*header, packet, now_ns);
    return false;
  }
  if (header->type == Type::data) impl_->latest = session;
  impl_->wake(session);
  const bool kept = session->receive(*header, packet, packet.lendable && impl_->kept < kMostKept, now_ns);
  impl_->kept += kept;
  return kept;
}

// A peer that was started anew is told so. With authentication nobody believes a RESET, so none is sent.
void Endpoint::Impl::on_stray(const Header& header, const RxPacket& packet, uint64_t now_ns) {
  ++strays.out_of_window;
  if (header.type == Type::ack || options.authenticate) return;
  const uint64_t due_ns = std::max(resets_due_ns, now_ns);
  if (due_ns - now_ns >= kMostResets * kResetEveryNs) return;
  resets_due_ns = due_ns + kResetEveryNs;
  resets.push_back({packet.from, packet.local, header.conn, header.number});
}

// OPEN and OPEN_ACK carry a tag under a key that nobody can make without the secret.
bool Endpoint::Impl::authentic(const RxPacket& packet, const Nonce& nonce) const {
  return !options.authenticate ||
         verify(opening_key(options.secret, nonce), 0, {packet.head, kHeaderBytes}, *body_of(packet));
}

void Endpoint::Impl::on_open_packet(const Header& header, const RxPacket& packet, uint64_t now_ns) {
  std::span<const uint8_t> bytes = *body_of(packet);
  if (bool(header.flags & kTagged) != options.authenticate || (options.authenticate && bytes.size() < kTagBytes)) {
    ++strays.unauthenticated;
    return;
  }
  if (options.authenticate) bytes = bytes.first(bytes.size() - kTagBytes);
  const std::optional<OpenBody> body = read_open(bytes);
  if (!body) {
    ++strays.malformed;
    return;
  }
  // Nothing is computed for a stranger, who does not know a nonce.
  if (header.type == Type::open) {
    if (std::find(listeners.begin(), listeners.end(), body->nonce) == listeners.end()) {
      ++strays.out_of_window;
    } else if (!authentic(packet, body->nonce)) {
      ++strays.unauthenticated;
    } else {
      on_open(header, *body, packet, now_ns);
    }
    return;
  }
  Session* session = find(header.conn);
  if (!session || session->identity().nonce != body->nonce || session->identity().mode != body->mode ||
      !session->knows(packet.from)) {
    ++strays.out_of_window;
  } else if (!authentic(packet, body->nonce)) {
    ++strays.unauthenticated;
  } else {
    wake(session);
    session->answered(*body, header, packet, now_ns);
  }
}

void Endpoint::Impl::on_open(const Header& header, const OpenBody& body, const RxPacket& packet, uint64_t now_ns) {
  for (const auto& session : sessions) {
    if (!session || !session->opened_by(body)) continue;
    wake(session.get());
    session->accept(body, header, packet);  // once more, or on a further path
    return;
  }
  Session* session = add(body.nonce, body.mode, false, now_ns);
  if (session) session->accept(body, header, packet);
}

void Endpoint::Impl::on_reset(const Header& header, const RxPacket& packet) {
  for (const auto& session : sessions)
    if (session && session->peer_id() == header.conn && session->knows(packet.from)) {
      wake(session.get());
      return session->reset_by_peer(header.number);
    }
  ++strays.out_of_window;
}

size_t Endpoint::expect(std::span<Expected> expected) const {
  return impl_->latest ? impl_->latest->expect(expected) : 0;
}

uint64_t Endpoint::changes() const { return impl_->changes; }

size_t Endpoint::transmit(std::span<TxPacket> packets, uint64_t now_ns) {
  size_t count = 0;
  // Each is first by turns, so that under load all are served alike.
  std::vector<Session*>& active = impl_->active;
  for (size_t i = 0; i < active.size() && count < packets.size(); ++i)
    count += active[(impl_->turn + i) % active.size()]->transmit(packets.subspan(count), now_ns);
  ++impl_->turn;
  return count + impl_->transmit_resets(packets.subspan(count));
}

size_t Endpoint::Impl::transmit_resets(std::span<TxPacket> packets) {
  size_t count = 0;
  resets_sent.clear();
  for (; !resets.empty() && count < packets.size(); ++count) {
    resets_sent.push_back(resets.back());
    resets.pop_back();
  }
  for (size_t i = 0; i < count; ++i) {  // the addresses stay where they are now
    const Reset& reset = resets_sent[i];
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
  Impl& impl = *impl_;
  // Woken much later than was asked for: this process was stopped, or had no core.
  uint64_t pause_ns = 0;
  const uint64_t expected_ns = std::max(impl.promised_ns, impl.advanced_ns);
  if (impl.advanced_ns != 0 && now_ns > expected_ns + kPauseNs) pause_ns = now_ns - expected_ns;
  impl.advanced_ns = now_ns;
  if (pause_ns > 0) impl.idle_look_ns = 0;
  if (impl.idle_look_ns <= now_ns) {
    impl.run_timers(&impl.idle, now_ns, pause_ns);
    impl.idle_look_ns = now_ns + kIdleLookNs;
  }
  impl.run_timers(&impl.active, now_ns, pause_ns);
  impl.promised_ns = 0;
}

// Runs the timers of these sessions, and moves each to the list that it now belongs to.
void Endpoint::Impl::run_timers(std::vector<Session*>* list, uint64_t now_ns, uint64_t pause_ns) {
  for (size_t i = 0; i < list->size();) {
    Session* session = (*list)[i];
    if (pause_ns > 0) session->forgive(pause_ns, now_ns);
    if (now_ns >= session->deadline_ns()) {
      ++changes;
      session->advance(now_ns);
    }
    if (i == list->size() || (*list)[i] != session) continue;  // what it told its owner has woken it
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

bool Endpoint::under_way() const { return !impl_->active.empty(); }

// Sessions with nothing under way wait for the next look at all of them, so that many share a wake-up.
uint64_t Endpoint::next_ns() const {
  uint64_t first = UINT64_MAX;
  for (Session* session : impl_->idle) first = std::min(first, session->deadline_ns());
  first = std::max(first, impl_->idle_look_ns);
  for (Session* session : impl_->active) first = std::min(first, session->deadline_ns());
  impl_->promised_ns = first == UINT64_MAX ? 0 : first;
  return first;
}

bool Endpoint::wants_to_transmit(uint64_t now_ns) const {
  if (!impl_->resets.empty()) return true;
  for (Session* session : impl_->active)
    if (session->wants_to_transmit(now_ns)) return true;
  return false;
}

const Counters* Endpoint::counters(ConnectionId id) const {
  Session* session = impl_->find(id);
  return session ? &session->counters() : nullptr;
}

const Counters& Endpoint::strays() const { return impl_->strays; }

}  // namespace harp
