// Packet sequences into a live connection of HARP. The input is a script: packets pass, are lost, repeated, changed or
// made up; buffers are posted, messages sent; time passes. Whatever happens: no byte is written outside of a posted
// buffer, no request is completed twice, and after the script everything completes or fails. With authentication, what
// is received is what was sent.
#include <cstdlib>
#include <deque>

#include "harp/pair.h"

namespace {

using namespace harp;
using namespace harp::test;

constexpr size_t kMostMessages = 24, kGuard = 32, kCapacity = 20'000;
constexpr uint8_t kGuardByte = 0xa7;

class Script {
 public:
  Script(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool over() const { return at_ == end_; }
  uint8_t byte() { return at_ == end_ ? 0 : *at_++; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

uint8_t pattern(size_t message, size_t i) { return uint8_t(message * 37 + i * 11 + (i >> 8)); }

class Run {
 public:
  explicit Run(Script script)
      : script_(script), flags_(script_.byte()), authenticate_(flags_ & 1), stream_(flags_ & 2),
        pair_(options(), stream_ ? Mode::stream : Mode::message) {
    pair_.settle();
  }
  void play() {
    while (!script_.over()) {
      step();
      check();
    }
    pair_.run(20 * kSecond);
    pair_.a.endpoint.close(pair_.a.connection, pair_.now);
    pair_.b.endpoint.close(pair_.b.connection, pair_.now);
    pair_.run(10 * kSecond);
    check();
    if (pair_.a.completions.size() != sent_.size() || pair_.b.completions.size() != posted_.size()) std::abort();
    if (!pair_.a.kept.empty() || !pair_.b.kept.empty()) std::abort();
  }

 private:
  Options options() const {
    Options options;
    options.authenticate = authenticate_;
    options.secret = "secret";
    options.stream_frames = 8;
    options.first_number = flags_ & 4 ? (uint64_t(1) << 32) - 10 : 1;
    options.paths = flags_ & 8 ? 2 : 1;
    return options;
  }
  void step() {
    switch (script_.byte() % 8) {
      case 0: return send(script_.byte() * 80u);
      case 1: return post(script_.byte() * 80u);
      case 2: return exchange();
      case 3: return pair_.later(uint64_t(script_.byte()) * 100 * kMicrosecond);
      case 4: return pair_.settle();
      case 5: return inject();
      case 6: return pair_.b.endpoint.consume(pair_.b.connection, script_.byte() % 8, pair_.now);
      case 7: return pair_.a.endpoint.advance(pair_.now);
    }
  }
  void send(uint32_t bytes) {
    if (sent_.size() == kMostMessages) return;
    if (stream_) bytes = std::min(bytes, 1440u);
    std::vector<uint8_t> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = pattern(sent_.size(), i);
    sent_.push_back(std::move(data));
    pair_.a.endpoint.send(pair_.a.connection, sent_.back().data(), bytes, sent_.size() - 1, pair_.now);
  }
  void post(uint32_t capacity) {
    if (stream_ || posted_.size() == kMostMessages) return;
    posted_.emplace_back(capacity + kGuard, kGuardByte);
    pair_.b.endpoint.receive(pair_.b.connection, posted_.back().data(), capacity, posted_.size() - 1, pair_.now);
  }
  // Both sides' packets, each with a fate of its own.
  void exchange() {
    const std::vector<Wire> from_a = pair_.a.give(pair_.now), from_b = pair_.b.give(pair_.now);
    for (const Wire& wire : from_a) fate(wire, pair_.b);
    for (const Wire& wire : from_b) fate(wire, pair_.a);
  }
  void fate(const Wire& wire, Host& to) {
    latest_ = wire;
    switch (script_.byte() % 8) {
      case 0: return;
      case 1: to.take(wire, pair_.now); [[fallthrough]];
      case 2: return change(wire, to);
      default: return to.take(wire, pair_.now);
    }
  }
  void change(Wire wire, Host& to) {
    for (int changes = script_.byte() % 4 + 1; changes > 0; --changes) {
      const size_t all = wire.head.size() + wire.payload.size(), at = (script_.byte() << 8 | script_.byte()) % all;
      (at < wire.head.size() ? wire.head[at] : wire.payload[at - wire.head.size()]) = script_.byte();
    }
    if (script_.byte() % 8 == 0) wire.head.resize(kHeaderBytes + script_.byte() % 64);
    if (script_.byte() % 8 == 0) wire.payload.resize(script_.byte());
    to.take(wire, pair_.now);
  }
  void inject() {
    if (latest_.head.empty()) return;
    Wire wire = latest_;
    wire.head.resize(kHeaderBytes);
    wire.payload.clear();
    wire.head[0] = script_.byte();
    wire.head[1] = script_.byte();
    for (size_t i = 6; i < kHeaderBytes; ++i)
      if (script_.byte() % 2) wire.head[i] = script_.byte();
    for (size_t n = script_.byte(); n > 0; --n) wire.head.push_back(script_.byte());
    (wire.to.bytes[0] == 1 ? pair_.a : pair_.b).take(wire, pair_.now);
  }
  void check() const {
    for (const auto& buffer : posted_)
      for (size_t i = buffer.size() - kGuard; i < buffer.size(); ++i)
        if (buffer[i] != kGuardByte) std::abort();
    once(pair_.a.completions, sent_.size());
    once(pair_.b.completions, posted_.size());
    if (!authenticate_) return;
    for (const Completion& done : pair_.b.completions) {
      if (done.status != Status::ok) continue;
      const std::vector<uint8_t>& sent = sent_.at(done.request);
      if (done.bytes != sent.size()) std::abort();
      if (!std::equal(sent.begin(), sent.end(), posted_[done.request].begin())) std::abort();
    }
    for (size_t i = 0; i < pair_.b.records.size(); ++i)
      if (pair_.b.records[i] != std::string(sent_.at(i).begin(), sent_.at(i).end())) std::abort();
  }
  static void once(const std::vector<Completion>& completions, size_t requests) {
    std::vector<bool> done(requests);
    for (const Completion& completion : completions) {
      if (completion.request >= requests || done[completion.request]) std::abort();
      done[completion.request] = true;
    }
  }

  Script script_;
  const uint8_t flags_;
  const bool authenticate_, stream_;
  Pair pair_;
  std::deque<std::vector<uint8_t>> sent_, posted_;  // whose memory stays where it is
  Wire latest_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Run(Script(data, size)).play();
  return 0;
}
