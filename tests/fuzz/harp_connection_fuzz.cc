// Packet sequences into a live connection of HARP. The input is a script: packets pass, are lost, repeated, changed,
// come late or are made up; buffers are posted, messages sent, records consumed; time passes; a side closes.
//
// Whatever happens: no byte is written outside of a posted buffer; no request is completed twice; an engine that has
// done its round has nothing to do until next_ns(); after the script, on a wire that carries everything, all requests
// whose other half is there complete, or all fail; closed on both sides, nothing is left.
// While nobody forged (or with authentication, whoever forged what): what is received is what was sent, and a
// connection ends only by a close or by silence.
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <source_location>

#include "harp/pair.h"

namespace {

using namespace harp;
using namespace harp::test;

constexpr size_t kMostMessages = 24, kGuard = 32, kHistory = 64;
constexpr uint8_t kGuardByte = 0xa7;
constexpr uint64_t kPeerTimeoutNs = kSecond, kConnectTimeoutNs = 2 * kSecond;
constexpr uint8_t kAuthenticate = 1, kStreamMode = 2, kNearWrap = 4, kTwoPaths = 8, kNoLending = 16, kOpenByScript = 32;

void expect(bool holds, std::source_location where = std::source_location::current()) {
  if (holds) return;
  std::fprintf(stderr, "%s: line %u does not hold\n", where.function_name(), unsigned(where.line()));
  std::abort();
}

class Script {
 public:
  Script(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool over() const { return at_ == end_; }
  uint8_t byte() { return at_ == end_ ? 0 : *at_++; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// One end, and what its application has asked for: its sends are the requests 0, 2, 4 ..., its receives 1, 3, 5 ...
struct Side {
  explicit Side(Host& h) : host(h) {}
  Host& host;
  std::deque<std::vector<uint8_t>> sent, posted;  // whose memory stays where it is; posted: with guards on both sides
  uint8_t salt = 0;

  uint32_t capacity(size_t i) const { return uint32_t(posted[i].size() - 2 * kGuard); }
  void send(uint32_t bytes, uint64_t now) {
    if (sent.size() == kMostMessages || host.connection == 0) return;
    std::vector<uint8_t> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = uint8_t(salt + sent.size() * 37 + i * 11 + (i >> 8));
    sent.push_back(std::move(data));
    expect(host.endpoint.send(host.connection, sent.back().data(), bytes, 2 * (sent.size() - 1), now));
  }
  void post(uint32_t capacity, uint64_t now) {
    if (posted.size() == kMostMessages || host.connection == 0) return;
    posted.emplace_back(capacity + 2 * kGuard, kGuardByte);
    uint8_t* to = posted.back().data() + kGuard;
    expect(host.endpoint.receive(host.connection, to, capacity, 2 * (posted.size() - 1) + 1, now));
  }
  const Completion* completion(uint64_t request) const {
    for (const Completion& done : host.completions)
      if (done.request == request) return &done;
    return nullptr;
  }
  bool all_completed() const { return host.completions.size() == sent.size() + posted.size(); }

  void check_requests() const {
    std::vector<bool> done(2 * kMostMessages);
    for (const Completion& completion : host.completions) {
      expect(completion.request / 2 < (completion.request % 2 ? posted.size() : sent.size()));
      expect(!done[completion.request]);
      done[completion.request] = true;
    }
    for (const std::vector<uint8_t>& buffer : posted)
      for (size_t i = 0; i < kGuard; ++i)
        expect(buffer[i] == kGuardByte && buffer[buffer.size() - 1 - i] == kGuardByte);
  }
  // What has come is what `peer` sent.
  void check_content(const Side& peer) const {
    for (const Completion& done : host.completions) {
      if (done.request % 2 == 0 || (done.status != Status::ok && done.status != Status::too_long)) continue;
      const size_t number = done.request / 2;
      const std::vector<uint8_t>& data = peer.sent.at(number);
      expect(done.bytes == data.size());
      expect((done.status == Status::too_long) == (data.size() > capacity(number)));
      if (done.status != Status::ok) continue;
      const uint8_t* const end = std::mismatch(data.begin(), data.end(), posted[number].data() + kGuard).second;
      expect(end == posted[number].data() + kGuard + data.size());
      expect(std::count(end, end + capacity(number) - data.size(), kGuardByte) == long(capacity(number) - data.size()));
    }
    for (size_t i = 0; i < host.records.size(); ++i)
      expect(host.records[i] == std::string(peer.sent.at(i).begin(), peer.sent.at(i).end()));
  }
};

class Run {
 public:
  explicit Run(Script script)
      : script_(script), flags_(script_.byte()), pair_(options(), is(kStreamMode) ? Mode::stream : Mode::message),
        a_(pair_.a), b_(pair_.b) {
    b_.salt = 101;
    pair_.b.lends = !is(kNoLending);
    if (!is(kOpenByScript)) pair_.settle();
  }
  void play() {
    const uint64_t begin = pair_.now;
    while (!script_.over()) {
      step();
      check();
    }
    script_ns_ = pair_.now - begin;
    // Whoever waits longest is a side that hears of nothing: it asks, and then waits for an answer in vain.
    recover(kConnectTimeoutNs + 3 * kPeerTimeoutNs);
    check_all_ended_or_done();
    pair_.a.endpoint.close(pair_.a.connection, pair_.now);
    pair_.b.endpoint.close(pair_.b.connection, pair_.now);
    recover(3 * kPeerTimeoutNs);
    for (const Side* side : {&a_, &b_}) {
      expect(side->all_completed());
      expect(side->host.kept.empty());
      expect(side->host.endpoint.counters(side->host.connection) == nullptr);
      expect(side->host.endpoint.next_ns() == UINT64_MAX);
    }
  }

 private:
  bool is(uint8_t flag) const { return flags_ & flag; }
  Options options() const {
    Options options;
    options.authenticate = is(kAuthenticate);
    options.secret = "secret";
    options.stream_frames = 8;
    options.first_number = is(kNearWrap) ? (uint64_t(1) << 32) - 10 : 1;
    options.paths = is(kTwoPaths) ? 2 : 1;
    options.peer_timeout_ns = kPeerTimeoutNs;
    options.connect_timeout_ns = kConnectTimeoutNs;
    return options;
  }
  bool untouched() const { return is(kAuthenticate) || !forged_; }

  void step() {
    switch (script_.byte() % 13) {
      case 0: return send(a_, script_.byte());
      case 1: return post(b_, script_.byte());
      case 2: return exchange();
      case 3: return later(script_.byte());
      case 4: return pair_.settle();
      case 5: return inject();
      case 6: return consume(b_, script_.byte() % 8);
      case 7: return pair_.a.endpoint.advance(pair_.now);
      case 8: return send(b_, script_.byte());
      case 9: return post(a_, script_.byte());
      case 10: return consume(a_, script_.byte() % 8);
      case 11: return replay();
      case 12: return close(script_.byte() % 16 == 1 ? a_ : b_);
    }
  }
  void send(Side& side, uint32_t n) { side.send(is(kStreamMode) ? std::min(n * 8, 1440u) : n * 80, pair_.now); }
  void post(Side& side, uint32_t n) {
    if (!is(kStreamMode)) side.post(n * 80, pair_.now);
  }
  void consume(Side& side, uint32_t records) {
    if (is(kStreamMode)) side.host.endpoint.consume(side.host.connection, records, pair_.now);
  }
  void later(uint64_t n) { pair_.later(n * n * 20 * kMicrosecond); }  // up to 1.3 s
  void close(Side& side) {
    if (side.host.connection == 0) return;
    closed_ = true;
    side.host.endpoint.close(side.host.connection, pair_.now);
  }

  // A round of both engines, in which each packet has a fate of its own.
  void exchange() {
    const std::vector<Wire> from_a = round(pair_.a), from_b = round(pair_.b);
    for (const Wire& wire : from_a) fate(wire);
    for (const Wire& wire : from_b) fate(wire);
  }
  std::vector<Wire> round(Host& host) {
    host.endpoint.advance(pair_.now);
    std::vector<Wire> wires = host.give(pair_.now);
    expect(!host.endpoint.wants_to_transmit(pair_.now));
    expect(host.endpoint.next_ns() > pair_.now);
    return wires;
  }
  Host& receiver_of(const Wire& wire) { return wire.from.bytes[0] == 1 ? pair_.b : pair_.a; }
  void fate(const Wire& wire) {
    history_.push_back(wire);
    if (history_.size() > kHistory) history_.pop_front();
    Host& to = receiver_of(wire);
    switch (script_.byte() % 8) {
      case 0: return;  // a replay may bring it later
      case 1: to.take(wire, pair_.now); break;
      case 2: return change(wire);
      default: break;
    }
    to.take(wire, pair_.now);
  }
  void change(Wire wire) {
    forged_ = true;
    for (int changes = script_.byte() % 4 + 1; changes > 0; --changes) {
      const size_t all = wire.head.size() + wire.payload.size(), at = (script_.byte() << 8 | script_.byte()) % all;
      (at < wire.head.size() ? wire.head[at] : wire.payload[at - wire.head.size()]) = script_.byte();
    }
    if (script_.byte() % 8 == 0) wire.head.resize(script_.byte() % 128);
    if (script_.byte() % 8 == 0) wire.payload.resize(script_.byte());
    receiver_of(wire).take(wire, pair_.now);
  }
  // A packet of the past comes as it was.
  void replay() {
    if (history_.empty()) return;
    const Wire wire = history_[history_.size() - 1 - script_.byte() % history_.size()];
    receiver_of(wire).take(wire, pair_.now);
  }
  // Any bytes behind a header that is partly right.
  void inject() {
    if (history_.empty()) return;
    forged_ = true;
    Wire wire = history_.back();
    Host& to = receiver_of(wire);
    const uint8_t how = script_.byte();
    wire.head.resize(kHeaderBytes);
    wire.payload.clear();
    wire.head[0] = uint8_t(kVersion << 4 | (how & 7));
    if (how & 8) wire.head[0] = script_.byte();
    wire.head[1] = script_.byte();
    for (size_t i = 2; i < 6 && how & 16; ++i) wire.head[i] = script_.byte();  // another connection's id
    for (size_t i = 6; i < kHeaderBytes; ++i)
      if (script_.byte() % 2) wire.head[i] = script_.byte();
    if (how & 32 && pair_.b.connection != 0) wire.from.bytes[1] ^= 4;  // somebody else's address
    std::vector<uint8_t>& body = how & 64 ? wire.payload : wire.head;
    for (size_t n = script_.byte(); n > 0; --n) body.push_back(script_.byte());
    to.take(wire, pair_.now);
  }

  // The wire carries everything, and the applications take what comes.
  void recover(uint64_t ns) {
    const uint64_t end = pair_.now + ns;
    while (pair_.now < end) {
      pair_.run(std::min(end - pair_.now, ns / 8));
      consume(a_, kMostMessages);
      consume(b_, kMostMessages);
      check();
    }
    pair_.settle();
    expect(round(pair_.a).empty() && round(pair_.b).empty());
  }
  void check() {
    a_.check_requests();
    b_.check_requests();
    if (!untouched()) return;
    a_.check_content(b_);
    b_.check_content(a_);
    if (b_id_ == 0) b_id_ = pair_.b.connection;
    expect(b_id_ == pair_.b.connection);  // opened once, whatever is replayed
    for (const Side* side : {&a_, &b_})
      for (const auto& failure : side->host.failures) {
        const bool silence = failure.first == Status::peer_silent || failure.first == Status::connect_timeout;
        expect(silence || closed_ || (failure.first == Status::peer_failed && !is(kAuthenticate)));
        expect(failure.first != Status::peer_silent || pair_.now > kPeerTimeoutNs);
      }
  }
  void check_all_ended_or_done() const {
    const bool failed = !pair_.a.failures.empty() || !pair_.b.failures.empty();
    if (failed || closed_) {
      expect(!untouched() || closed_ || script_ns_ >= kPeerTimeoutNs / 2);
      expect(a_.all_completed() && b_.all_completed());
    } else if (untouched()) {
      check_matched(a_, b_);
      check_matched(b_, a_);
    }
  }
  void check_matched(const Side& from, const Side& to) const {
    if (is(kStreamMode)) {
      expect(to.host.records.size() == from.sent.size() && from.host.completions.size() == from.sent.size());
      return;
    }
    for (size_t i = 0; i < std::min(from.sent.size(), to.posted.size()); ++i) {
      expect(from.completion(2 * i) && to.completion(2 * i + 1));
      expect(from.sent[i].size() > to.capacity(i) || from.completion(2 * i)->status == Status::ok);
    }
  }

  Script script_;
  const uint8_t flags_;
  Pair pair_;
  Side a_, b_;
  std::deque<Wire> history_;
  ConnectionId b_id_ = 0;
  uint64_t script_ns_ = 0;
  bool forged_ = false, closed_ = false;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Run(Script(data, size)).play();
  return 0;
}
