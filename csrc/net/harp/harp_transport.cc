#include "net/harp/harp_transport.h"

#include <poll.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace lightcc {
namespace {

constexpr uint64_t kLookNs = 20'000'000;   // at all links, also where nothing has come
constexpr uint64_t kWaitingNs = 1'000'000; // while something waits for room
constexpr uint64_t kLastWordsNs = 50'000'000;
constexpr uint64_t kHelloNs = 600'000'000'000;  // a peer that has connected says within so long for which link

// "1440,<the handle's bytes in hexadecimal>"
std::string text_of(const harp_handle& handle, size_t record_bytes) {
  std::string text = std::to_string(record_bytes) + ",";
  char two[3];
  for (const uint8_t byte : handle.bytes) text.append(two, size_t(std::snprintf(two, sizeof two, "%02x", byte)));
  return text;
}
struct Where {
  size_t record_bytes;
  harp_handle handle;
};
Where parse(const std::string& address) {
  Where where{};
  const size_t comma = address.find(',');
  bool is_good = comma != address.npos && address.size() - comma - 1 == 2 * sizeof where.handle.bytes &&
                 std::sscanf(address.c_str(), "%zu", &where.record_bytes) == 1 && where.record_bytes > 0;
  for (size_t i = 0; is_good && i < sizeof where.handle.bytes; ++i) {
    unsigned byte = 0;
    is_good = std::sscanf(address.c_str() + comma + 1 + 2 * i, "%2x", &byte) == 1;
    where.handle.bytes[i] = uint8_t(byte);
  }
  if (!is_good) throw Error(Code::internal, "'" + address + "' is no address of HARP");
  return where;
}

void check(int status, const char* attempted) {
  if (status != HARP_OK) throw Error(Code::internal, std::string(attempted) + " over HARP: " + harp_error());
}

}  // namespace

class HarpTransport::HarpLink : public Link {
 public:
  HarpLink(HarpTransport& transport, OpenLink& state) : transport_(transport), state_(state) {}
  std::byte* reserve(size_t n) override { return open(), state_.stream.reserve(n); }
  void commit(size_t n) override {
    state_.stream.commit(n);
    transport_.has_work_ = true;
    transport_.sent_bytes_.fetch_add(n, std::memory_order_relaxed);
  }
  const std::byte* peek(size_t n) override {
    if (state_.connects) open();  // only the rank that connects must act before the peer does
    return state_.stream.peek(n);
  }
  void consume(size_t) override {
    state_.stream.consume();
    transport_.has_work_ = true;
  }
  size_t record_bytes() const override { return state_.stream.record_bytes(); }

 private:
  void open() {
    if (state_.connects && !state_.stream.connected()) transport_.open(state_);
  }
  HarpTransport& transport_;
  OpenLink& state_;
};

HarpTransport::HarpTransport(const HarpOptions& options, int rank, uint64_t epoch)
    : rank_(rank), epoch_(epoch), links_(rank) {
  harp_options all{};
  all.size = sizeof all;
  all.port = options.port.empty() ? nullptr : options.port.c_str();
  all.interface = options.interface.empty() ? nullptr : options.interface.c_str();
  all.port_range = options.port_range.empty() ? nullptr : options.port_range.c_str();
  all.inline_mode = options.inline_mode;
  all.peer_timeout_ms = options.peer_timeout_ms;
  all.connect_timeout_ms = options.connect_timeout_ms;
  check(harp_open(&all, &context_), "opening");
  check(harp_listen(context_, &handle_, &listener_), "listening");
  descriptor_ = harp_descriptor(context_);
  if (descriptor_ < 0) check(HARP_LOCAL_FAULT, "watching");
}

HarpTransport::~HarpTransport() {
  close();
  if (context_) harp_close_context(context_);
}

std::string HarpTransport::address() const { return text_of(handle_, harp_most_record_bytes(context_)); }

void HarpTransport::set_peers(std::vector<HarpPeer> peers) {
  peers_ = std::move(peers);
  watched_.resize(peers_.size());
}

// ---- links

HarpTransport::OpenLink& HarpTransport::link_state(const LinkKey& key) {
  return links_.get(key, [&] {
    const HarpPeer& peer = peers_[size_t(key.peer)];
    const size_t record_bytes = std::min(parse(peer.address).record_bytes, harp_most_record_bytes(context_));
    return std::unique_ptr<OpenLink>(new OpenLink{key, {context_, peer.name, record_bytes}, links_.connects(key.peer)});
  });
}

std::unique_ptr<Link> HarpTransport::link(int group, int lane, int peer) {
  return std::make_unique<HarpLink>(*this, link_state({group, lane, peer}));
}

void HarpTransport::open(OpenLink& state) {
  const LinkKey& key = state.key;
  if (state.is_closed || links_.ended()) return;
  const Where where = parse(peers_[size_t(key.peer)].address);
  harp_connection* connection = nullptr;
  check(harp_connect(context_, &where.handle, HARP_STREAM, &connection), "connecting");
  const std::string hello = frame_of({epoch_, key.group, key.lane, rank_, key.peer});
  std::memcpy(state.stream.reserve(hello.size()), hello.data(), hello.size());
  state.stream.commit(hello.size());
  attach(state, connection);
  has_news_ = true;  // what waits for the connection is to be handed over as soon as it is there
}

void HarpTransport::attach(OpenLink& state, harp_connection* connection) {
  state.stream.attach(connection);
  if (!std::exchange(state.is_active, true)) active_.push_back(&state);
  if (watch_ && !std::exchange(watched_[size_t(state.key.peer)], true)) watch_(state.key.peer);
}

void HarpTransport::probe(int peer) {
  OpenLink& state = link_state({0, LinkKey::kProbe, peer});
  if (!state.stream.connected()) open(state);
}

void HarpTransport::accept() {
  harp_connection* connection = nullptr;
  while (listener_ && harp_accept(listener_, &connection) == HARP_OK) incoming_.push_back({connection, now_ns()});
  for (const Incoming& one : std::exchange(incoming_, {}))
    if (!admit(one)) incoming_.push_back(one);
}

bool HarpTransport::admit(const Incoming& incoming) {
  harp_connection* const connection = incoming.connection;
  const void* record = nullptr;
  size_t bytes = 0;
  const int status = harp_recv_zc(connection, &record, &bytes);
  if (status == HARP_PENDING && now_ns() - incoming.since_ns < kHelloNs) return false;
  const auto hello = status == HARP_OK ? hello_in({static_cast<const char*>(record), bytes}) : std::nullopt;
  const bool is_peers = hello && hello->epoch == epoch_ && hello->to == rank_ && hello->from > rank_ &&
                        size_t(hello->from) < peers_.size() && !peers_[size_t(hello->from)].address.empty();
  const LinkKey key = is_peers ? LinkKey{hello->group, hello->lane, hello->from} : LinkKey{};
  OpenLink* state = is_peers ? &link_state(key) : nullptr;
  if (!state || state->is_closed || state->stream.connected()) return harp_close(connection), true;
  harp_consume(connection, 1);
  state->retired |= links_.is_retired(key.group);
  attach(*state, connection);
  if (state->retired && !std::exchange(state->sent_notice, true)) state->stream.send_notice({});
  if (const auto& cause = links_.ended()) state->stream.send_notice({cause->code(), cause->what()});
  return true;
}

bool HarpTransport::step(OpenLink& state) {
  const bool has_left = links_.has_left(state.key.peer);
  try {
    state.stream.step();
    if (state.retired) state.stream.discard();
  } catch (const Error&) {
    close(state);
    if (has_left || links_.ended() || state.retired) return false;
    throw;
  }
  const auto& notice = state.stream.notice();
  if (notice && notice->code != Code::ok && !links_.ended()) throw Error(notice->code, notice->why);
  if (state.retired && state.stream.delivered() && (notice || has_left)) close(state);
  return state.stream.has_waiting();
}

bool HarpTransport::step() {
  poll();
  const bool moved = std::exchange(has_news_, false);
  const uint64_t now = now_ns();
  if (!moved && waiting_ == 0 && now - looked_ns_ < kLookNs) return false;
  looked_ns_ = now;
  accept();
  int waiting = 0;
  for (OpenLink* state : active_)
    if (!state->is_closed) waiting += step(*state);
  waiting_ = waiting;
  std::erase_if(active_, [this](OpenLink* state) {
    if (!state->is_closed) return false;
    state->is_active = false;
    if (state->retired) links_.erase(state->key);
    return true;
  });
  return moved;
}

// HARP counts for connections that are open: what one had at its end is kept as far as it was seen.
NetworkFaults HarpTransport::faults() {
  if (!context_) return {retransmits_, 0};
  std::string json(harp_stats(context_, nullptr, 0), '\0');
  json.resize(std::min(harp_stats(context_, json.data(), json.size()), json.size()));
  constexpr std::string_view kName = "\"retransmitted\":";
  uint64_t open = 0;
  for (size_t at = json.find(kName); at != json.npos; at = json.find(kName, at + 1))
    open += std::strtoull(json.c_str() + at + kName.size(), nullptr, 10);
  retransmits_ += open - std::min(open, std::exchange(retransmits_seen_, open));
  return {retransmits_, 0};
}

void HarpTransport::flush() {
  if (has_work_) poll();
}

void HarpTransport::poll() {
  has_work_ = false;
  has_news_ |= harp_poll(context_) == HARP_OK;
}

uint64_t HarpTransport::arm() {
  uint64_t most_ns = 0;
  if (harp_arm(context_, &most_ns) != HARP_OK) return 0;
  return waiting_ > 0 ? std::min(most_ns, kWaitingNs) : most_ns;
}

// What a rank has committed is on its way when its collective is over, and moves when HARP is polled.
bool HarpTransport::busy() const { return waiting_ > 0 || (context_ && harp_under_way(context_) == HARP_OK); }

// ---- ends

void HarpTransport::close(OpenLink& state) {
  state.is_closed = true;
  state.stream.close();
}

bool HarpTransport::finish() {
  bool delivered = true;
  for (auto& [key, state] : links_) {
    if (state->is_closed || (!state->stream.connected() && !state->stream.has_committed())) continue;
    if (!std::exchange(state->sent_notice, true)) state->stream.send_notice({});
    step(*state);
    delivered &= state->stream.delivered() || links_.has_left(key.peer);
  }
  poll();
  return delivered;
}

void HarpTransport::retire(int group) {
  links_.retire(group);
  const auto links = links_.of_group(group);
  for (auto it = links.begin(); it != links.end();) {
    OpenLink& state = *it->second;
    // The peer may have used it alone, or not at all: if it did, its connection is on its way, and admitted.
    const bool is_unused = state.is_closed || !state.stream.connected();
    if (is_unused && !state.is_active) {
      it = links_.erase(it);
      continue;
    }
    state.retired = true;
    if (!is_unused && !std::exchange(state.sent_notice, true)) state.stream.send_notice({});
    ++it;
  }
}

void HarpTransport::end(const Error& cause) {
  if (!links_.end_epoch(cause)) return;
  for (auto& [key, state] : links_) {
    if (state->is_closed || !state->stream.connected()) continue;
    try {
      state->stream.send_notice({cause.code(), cause.what()});
    } catch (const Error&) {  // a peer that is gone needs to hear nothing
    }
  }
  poll();
}

bool HarpTransport::has_more_to_say() {
  bool waits = false;
  for (OpenLink* state : active_) {
    if (state->is_closed) continue;
    try {
      state->stream.step();
      waits |= state->stream.has_waiting();
    } catch (const Error&) {
      close(*state);
    }
  }
  return waits || harp_under_way(context_) == HARP_OK;
}

void HarpTransport::close() {
  if (!context_) return;
  end(Error(Code::shut_down, "this rank has shut down"));
  // Closing a connection drops what it has not delivered, the causes too.
  for (const uint64_t latest = now_ns() + kLastWordsNs; now_ns() < latest && has_more_to_say();) {
    pollfd one{descriptor_, POLLIN, 0};
    uint64_t most_ns = 0;
    if (harp_arm(context_, &most_ns) == HARP_OK) ::poll(&one, 1, 1);
    poll();
  }
  active_.clear();
  links_.clear();
  for (const Incoming& one : std::exchange(incoming_, {})) harp_close(one.connection);
  if (listener_) harp_stop_listening(std::exchange(listener_, nullptr));
  waiting_ = 0;
}

void HarpTransport::close_in_child() {
  for (auto& [key, state] : links_) state->stream.abandon();
  incoming_.clear();
  listener_ = nullptr;
  context_ = nullptr;
}

}  // namespace lightcc
