// A connection's life, requests and timers. What it receives is in session_receive.cc, what it sends in
// session_transmit.cc.
#include "harp_plugin/core/session.h"

#include <cstdio>

#include "base/hmac.h"

namespace harp {

namespace {

constexpr uint32_t kSignsOfLife = 8;  // packets that an idle connection exchanges within the peer's time-out
constexpr uint64_t kLongestTimeoutNs = 250 * kMillisecond;
constexpr uint32_t kTimeoutsUntilRest = 3, kTimeoutsUntilProbe = 3;
constexpr uint64_t kMostUnheardDataNs = 20 * kSecond;
constexpr uint64_t kRestNs = kSecond;
constexpr uint32_t kMostBackoff = 8;
// A peer that has much credit left need not hear soon of a little more: a packet that says so is to be acknowledged.
constexpr uint64_t kLateCreditNs = 2 * kMillisecond;

Key derive(const std::string& secret, const Nonce& nonce, uint32_t opener, uint32_t acceptor) {
  std::string text(reinterpret_cast<const char*>(nonce.data()), nonce.size());
  text.append(reinterpret_cast<const char*>(&opener), sizeof opener);
  text.append(reinterpret_cast<const char*>(&acceptor), sizeof acceptor);
  const lightcc::Digest digest = lightcc::hmac_sha256(secret, text);
  Key key;
  std::memcpy(&key.k0, digest.data(), sizeof key.k0);
  std::memcpy(&key.k1, digest.data() + sizeof key.k0, sizeof key.k1);
  return key;
}

std::string seconds(uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", double(ns) / kSecond);
  return text;
}

}  // namespace

const char* name_of(Status status) {
  switch (status) {
    case Status::ok: return "ok";
    case Status::pending: return "pending";
    case Status::invalid_argument: return "invalid argument";
    case Status::too_long: return "message longer than its buffer";
    case Status::peer_closed: return "closed by the peer";
    case Status::peer_failed: return "given up by the peer";
    case Status::peer_silent: return "peer silent";
    case Status::cancelled: return "closed on this side";
    case Status::connect_timeout: return "connect time-out";
    case Status::local_fault: return "local fault";
  }
  return "unknown";
}

Key opening_key(const std::string& secret, const Nonce& nonce) { return derive(secret, nonce, 0, 0); }

Session::Session(const Identity& identity, const Options& options, Events& events, uint64_t now_ns)
    : identity_(identity), options_(options), events_(events), path_count_(options.paths),
      choice_(identity.first_number ^ identity.id),
      sent_(identity.first_number, 0), received_(0),
      congestion_(Congestion::Limits{.most_packets = kMostWindow}), outgoing_(kMostRequests),
      incoming_(identity.id, options), stream_(options.stream_frames), opened_ns_(now_ns),
      heard_ns_(now_ns) {
  if (options_.authenticate) open_key_ = opening_key(options_.secret, identity_.nonce);
}

OpenBody Session::offer() const {
  return {.nonce = identity_.nonce,
          .conn = identity_.id,
          .first_number = identity_.first_number,
          .payload = options_.payload,
          .receive_packets = options_.receive_packets,
          .eager_bytes = options_.eager_bytes,
          .eager_messages = options_.eager_messages,
          .stream_frames = options_.stream_frames,
          .mode = identity_.mode,
          .paths = uint8_t(path_count_)};
}

void Session::connect_to(const Address& address) {
  for (int p = 0; p < path_count_; ++p) {
    paths_[p].to = address;
    paths_[p].local = uint16_t(p);
  }
}

void Session::agree(const OpenBody& peer) {
  peer_offer_ = peer;
  peer_id_ = peer.conn;
  payload_ = std::min(options_.payload, peer.payload);
  const uint32_t most = std::min(peer.receive_packets, kMostWindow);
  sent_ = SentPackets(identity_.first_number, most + kMostControlInFlight);
  // A window that never binds would not know when it shrinks.
  congestion_ = Congestion({.most_packets = most, .target_ns = options_.delay_target_ns});
  received_ = ReceivedNumbers(peer.first_number);
  outgoing_.agree({.mode = identity_.mode,
                   .payload = payload_,
                   .eager_bytes = peer.eager_bytes,
                   .eager_messages = peer.eager_messages,
                   .credit = peer.stream_frames});
  incoming_.agree(payload_);
  announced_ = identity_.mode == Mode::stream ? options_.stream_frames : 0;
  if (!options_.authenticate) return;
  const uint32_t opener = identity_.opener ? identity_.id : peer_id_;
  const uint32_t acceptor = identity_.opener ? peer_id_ : identity_.id;
  key_ = derive(options_.secret, identity_.nonce, opener, acceptor);
}

void Session::accept(const OpenBody& body, const Packet& packet) {
  if (peer_id_ == 0) {
    agree(body);
    path_count_ = body.paths;
  }
  if (packet.header.path >= path_count_) return;
  learn_path(packet);
  open_acks_due_ |= uint8_t(1) << packet.header.path;
}

void Session::answered(const OpenBody& body, const Packet& packet, uint64_t now_ns) {
  if (!identity_.opener || packet.header.path >= path_count_) return;
  if (state_ == State::opening) {
    agree(body);
    state_ = State::open;
    heard_ns_ = now_ns;
    events_.tell(event::Opened{identity_.id, std::nullopt, packet.came.from});
  } else if (body.conn != peer_id_) {
    return;
  }
  learn_path(packet);
  probe_due_ = true;  // tells the peer that its OPEN_ACK has arrived
}

void Session::learn_path(const Packet& packet) {
  Path& path = paths_[packet.header.path];
  if (path.known) return;
  path.known = true;
  if (identity_.opener) return;  // it knows from where to where
  path.to = packet.came.from;
  path.local = packet.came.local;
}

bool Session::knows(const Address& address) const {
  for (int p = 0; p < path_count_; ++p)
    if (paths_[p].to == address) return true;
  return false;
}

bool Session::send(const uint8_t* data, uint32_t bytes, uint64_t request, uint64_t) {
  if (over_ != Status::ok) {
    complete({request, over_, 0});
    return true;
  }
  if (outgoing_.full()) return false;
  outgoing_.submit(data, bytes, request);
  return true;
}

bool Session::post(uint8_t* to, uint32_t capacity, uint64_t request, uint64_t now_ns) {
  const bool received_already = incoming_.has_all(incoming_.posted());
  if (over_ != Status::ok && !(peer_closed_ && received_already)) {
    complete({request, over_, 0});
    return true;
  }
  if (incoming_.full()) return false;
  if (const std::optional<Completion> done = incoming_.post(to, capacity, request)) received(*done);
  // Small messages come without a grant, so that theirs can wait for an acknowledgement to ride on.
  if (capacity > options_.eager_bytes || incoming_.posted() - announced_ >= options_.eager_messages / 2) {
    grant_due_ = true;
  } else if (grant_ns_ == kNever) {
    grant_ns_ = now_ns + options_.ack_delay_ns;
  }
  return true;
}

void Session::consume(uint32_t records, uint64_t now_ns) {
  stream_.consume(records, [this](const RxPacket& packet) { events_.release(packet); });
  if (stream_.limit() - announced_ >= options_.stream_frames / 4) {
    grant_due_ = true;
  } else if (stream_.limit() > announced_ && grant_ns_ == kNever) {
    grant_ns_ = now_ns + kLateCreditNs;
  }
}

void Session::close(uint64_t now_ns) {
  told_ = true;
  const bool sent_all = outgoing_.idle();
  if (state_ == State::open || state_ == State::opening) {
    close_body_ = {sent_all ? CloseReason::done : CloseReason::failed};
    const bool reachable = state_ == State::open;
    state_ = State::closing;
    over_ = Status::cancelled;
    abandon_packets();
    fail_requests(Status::cancelled);
    close_due_ = reachable;
    linger_ns_ = reachable ? now_ns + options_.peer_timeout_ns : now_ns;
  } else {
    linger_ns_ = peer_closed_ ? now_ns + 3 * timeout_ns() : now_ns;  // its CLOSE may come once more
  }
  stream_.clear([this](const RxPacket& packet) { events_.release(packet); });
  if (linger_ns_ <= now_ns) finished_ = true;
}

void Session::fail_requests(Status status) {
  const auto done = [this](const Completion& completion) { complete(completion); };
  closed_floor_ = std::min(closed_floor_, incoming_.oldest());
  outgoing_.fail(status, done);
  incoming_.fail(status, done);
}

void Session::fail(Status status, const std::string& why) {
  if (state_ == State::closed) return;
  const bool silent_end = told_;  // close() was called: nobody waits for news
  state_ = State::closed;
  over_ = status;
  abandon_packets();
  fail_requests(status);
  if (silent_end) {
    finished_ = true;
    return;
  }
  tell_failed(status, why);
}

// What is under way is of no interest any more.
void Session::abandon_packets() {
  for (uint64_t number = sent_.oldest(); number < sent_.next(); ++number)
    sent_.at(number).fate = SentPacket::Fate::settled;
  for (Path& path : paths_) path.in_flight = 0;
  in_flight_ = 0;
  loss_ns_ = data_lost_ns_ = kNever;
}

void Session::reset_by_peer(uint32_t number) {
  if (options_.authenticate || state_ == State::opening || state_ == State::closed || peer_closed_) return;
  const uint64_t named = expand(number, sent_.next());
  if (named < sent_.oldest() || named >= sent_.next()) return;
  fail(Status::peer_failed, "the peer does not know the connection: it was started anew or has given it up");
}

uint64_t Session::timeout_ns() const {
  const uint64_t once = rtt_.timeout_ns(options_.least_timeout_ns) + 2 * options_.ack_delay_ns;
  return std::min(once << std::min(backoff_, kMostBackoff), std::max(once, kLongestTimeoutNs));
}

// Whoever was last heard long ago gets the time to answer that a sign of life has.
uint64_t Session::silent_ns() const {
  const uint64_t to_answer_ns = options_.peer_timeout_ns - options_.peer_timeout_ns / kSignsOfLife;
  return std::max(heard_ns_ + options_.peer_timeout_ns, asked_ns_ + to_answer_ns);
}

uint64_t Session::deadline_ns() const {
  uint64_t first = linger_ns_;
  if (state_ == State::opening) {
    first = std::min(first, opened_ns_ + options_.connect_timeout_ns);
    if (!identity_.opener) return std::min(first, opened_ns_ + options_.peer_timeout_ns);
    return std::min(first, open_ns_);
  }
  if (state_ == State::closed) return first;
  if (in_flight_ > 0) {
    first = std::min({first, silent_ns(), timeout_base_ns_ + timeout_ns(), loss_ns_});
  } else if (state_ == State::open) {
    first = std::min(first, heard_ns_ + options_.peer_timeout_ns / kSignsOfLife);
  }
  return std::min({first, ack_ns_, grant_ns_});
}

void Session::advance(uint64_t now_ns) {
  if (now_ns >= linger_ns_) {
    finished_ = true;
    return;
  }
  if (state_ == State::opening) {
    if (identity_.opener && now_ns >= opened_ns_ + options_.connect_timeout_ns)
      return fail(Status::connect_timeout, "nobody answered within " + seconds(options_.connect_timeout_ns));
    if (!identity_.opener && now_ns >= opened_ns_ + options_.peer_timeout_ns) finished_ = true;
    return;
  }
  if (state_ == State::closed) return;
  if (in_flight_ > 0 && now_ns >= silent_ns())
    return fail(Status::peer_silent, "no sign of life for " + seconds(options_.peer_timeout_ns));
  const uint64_t patience_ns = std::min(options_.peer_timeout_ns, kMostUnheardDataNs);
  if (data_lost_ns_ != kNever && now_ns >= data_lost_ns_ + patience_ns && now_ns < heard_ns_ + kSilenceNs)
    return fail(Status::peer_silent, "the peer answers, but no data has got through to it for " + seconds(patience_ns) +
                                         ": packets with " + std::to_string(payload_) +
                                         " bytes of payload may be too large for the path; lower HARP_MTU. Or a packet "
                                         "that is not the peer's has been let in, which HARP_AUTH=1 on both sides "
                                         "prevents");
  if (now_ns >= ack_ns_) ack_due_ = true;
  if (now_ns >= grant_ns_) grant_due_ = true;
  if (in_flight_ == 0) {
    if (state_ == State::open && now_ns >= heard_ns_ + options_.peer_timeout_ns / kSignsOfLife) probe_due_ = true;
    return;
  }
  if (now_ns >= loss_ns_) detect_losses(now_ns);
  if (in_flight_ > 0 && now_ns >= timeout_base_ns_ + timeout_ns()) timed_out(now_ns);
}

// Nothing was acknowledged for too long: what was sent first goes once more, whatever the window says. Only a second
// time-out in a row speaks of the network; one alone is most often a peer that was not scheduled.
void Session::timed_out(uint64_t now_ns) {
  ++counters_.timeouts;
  ++backoff_;
  timeout_base_ns_ = now_ns;
  if (backoff_ == 2) congestion_.timed_out(now_ns);
  uint64_t number = sent_.oldest();
  while (number < sent_.next() && sent_.at(number).fate != SentPacket::Fate::in_flight) ++number;
  if (number == sent_.next()) return;
  Path& path = paths_[sent_.at(number).path];
  lose(sent_.at(number), SentPacket::Fate::overdue, now_ns);
  beyond_window_ = 2;
  if (data_lost_ns_ != kNever && backoff_ >= kTimeoutsUntilProbe) probe_due_ = true;  // is it the data, or the peer?
  if (++path.timeouts < kTimeoutsUntilRest || path_count_ == 1) return;
  // The path carries nothing any more: all that it was given goes over the others.
  path.timeouts = 0;
  path.rest_until_ns = now_ns + kRestNs;
  path_burst_ = 0;
  for (; number < sent_.next(); ++number)
    if (SentPacket& packet = sent_.at(number); packet.fate == SentPacket::Fate::in_flight)
      if (&paths_[packet.path] == &path) lose(packet, SentPacket::Fate::overdue, now_ns);
}

// What has come since the pause is not from the future.
void Session::forgive(uint64_t pause_ns, uint64_t now_ns) {
  for (uint64_t* since_ns : {&opened_ns_, &heard_ns_, &asked_ns_, &timeout_base_ns_})
    *since_ns = std::min(*since_ns + pause_ns, now_ns);
  if (data_lost_ns_ != kNever) data_lost_ns_ = std::min(data_lost_ns_ + pause_ns, now_ns);
}

bool Session::idle(uint64_t now_ns) {
  return state_ != State::opening && in_flight_ == 0 && ack_ns_ == kNever && grant_ns_ == kNever &&
         linger_ns_ == kNever && !wants_to_transmit(now_ns);
}

const Counters& Session::counters() {
  counters_.window_packets = window();
  counters_.srtt_ns = rtt_.smoothed_ns();
  counters_.least_rtt_ns = rtt_.least_ns();
  return counters_;
}

}  // namespace harp
