// Random workloads over random networks, in virtual time. HARP_SEEDS says how many seeds, HARP_FIRST_SEED which first:
//   HARP_SEEDS=2000 harp_tests --gtest_filter=Simulator.RandomNetworksDeliverEveryMessage
//   HARP_SEEDS=1 HARP_FIRST_SEED=123 harp_tests --gtest_filter=Simulator.RandomNetworks*  # replays seed 123
#include "harp/simulator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <numeric>

#include "labels.h"

LABEL(alone);

namespace harp::test {
namespace {

// What one side of a connection sends to the other: messages or records of random sizes, submitted, posted and consumed
// at random times.
class Flow {
 public:
  Flow(Simulator& simulator, SimulatedHost& from, SimulatedHost& to, Mode mode, size_t count, uint32_t payload)
      : simulator_(simulator), from_(from), to_(to), mode_(mode) {
    for (size_t i = 0; i < count; ++i) {
      const uint32_t bytes = size(payload);
      Message message{std::vector<uint8_t>(bytes), {}, 0};
      for (uint8_t& byte : message.data) byte = uint8_t(simulator.random());
      message.capacity = simulator.chance(0.2) ? bytes + uint32_t(simulator.below(3000)) : bytes;
      if (bytes > 1 && simulator.chance(0.03)) message.capacity = bytes - 1;
      message.buffer.assign(message.capacity + kGuard, kGuardByte);
      messages_.push_back(std::move(message));
    }
  }
  void start(ConnectionId from_id, ConnectionId to_id, uint64_t base_request) {
    from_id_ = from_id;
    to_id_ = to_id;
    base_ = base_request;
    submit();
    if (mode_ == Mode::message) post();
  }
  bool done() const { return sent_ == messages_.size() && received_ == messages_.size(); }
  bool owns(uint64_t request) const { return request / 2 >= base_ && request / 2 < base_ + messages_.size(); }

  void completed(const Completion& completion, std::string* fault) {
    Message& message = messages_[completion.request / 2 - base_];
    const bool sender = completion.request % 2 == 0;
    bool& done = sender ? message.sent : message.received;
    if (done) *fault = "a request was completed twice";
    done = true;
    ++(sender ? sent_ : received_);
    const bool fits = mode_ == Mode::stream || message.data.size() <= message.capacity;
    // A small message may have left before its buffer was posted: its sender did its part.
    const bool as_expected = completion.status == (fits ? Status::ok : Status::too_long);
    if (!as_expected && !(sender && completion.status == Status::ok && message.data.size() <= kEager))
      *fault = std::string("a request ended with ") + name_of(completion.status);
    if (completion.bytes != message.data.size()) *fault = "a wrong number of bytes";
    if (!sender) check(message, fits, fault);
  }
  void record(const Record& record, std::string* fault) {
    if (received_ == messages_.size()) {
      *fault = "a record too many";
      return;
    }
    const Message& message = messages_[received_++];
    if (record.bytes != message.data.size() || !std::equal(message.data.begin(), message.data.end(), record.data))
      *fault = "a record is not what was sent";
    ++unconsumed_;
    if (consuming_) return;
    consuming_ = true;
    simulator_.at(simulator_.now + simulator_.below(200 * kMicrosecond), [this] {
      consuming_ = false;
      to_.endpoint.consume(to_id_, std::exchange(unconsumed_, 0), simulator_.now);
      to_.poll();
    });
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kGuardByte = 0xe5;
  static constexpr size_t kEager = 8192;
  struct Message {
    std::vector<uint8_t> data, buffer;
    uint32_t capacity;
    bool sent = false, received = false;
  };
  uint32_t size(uint32_t payload) {
    static constexpr uint32_t kSmall[] = {0, 1, 15, 16, 17, 100, 8191, 8192, 8193, 65536};
    if (mode_ == Mode::stream) return uint32_t(simulator_.below(payload + 1));
    switch (simulator_.below(8)) {
      case 0: return payload - 1 + uint32_t(simulator_.below(3));
      case 1: return uint32_t(simulator_.below(300'000));
      case 2: return uint32_t(simulator_.below(20'000));
      default: return kSmall[simulator_.below(std::size(kSmall))];
    }
  }
  void submit() {
    while (submitted_ < messages_.size()) {
      const Message& message = messages_[submitted_];
      if (!from_.endpoint.send(from_id_, message.data.data(), uint32_t(message.data.size()), 2 * (base_ + submitted_),
                               simulator_.now))
        break;
      ++submitted_;
      if (simulator_.chance(0.3)) break;
    }
    from_.poll();
    if (submitted_ < messages_.size())
      simulator_.at(simulator_.now + simulator_.below(100 * kMicrosecond), [this] { submit(); });
  }
  void post() {
    while (posted_ < messages_.size()) {
      Message& message = messages_[posted_];
      if (!to_.endpoint.receive(to_id_, message.buffer.data(), message.capacity, 2 * (base_ + posted_) + 1,
                                simulator_.now))
        break;
      ++posted_;
      if (simulator_.chance(0.3)) break;
    }
    to_.poll();
    if (posted_ < messages_.size())
      simulator_.at(simulator_.now + simulator_.below(200 * kMicrosecond), [this] { post(); });
  }
  void check(const Message& message, bool fits, std::string* fault) {
    for (size_t i = fits ? message.data.size() : message.capacity; i < message.buffer.size(); ++i)
      if (message.buffer[i] != kGuardByte) *fault = "bytes behind a message were written";
    if (fits && !std::equal(message.data.begin(), message.data.end(), message.buffer.begin()))
      *fault = "a message is not what was sent";
  }

  Simulator& simulator_;
  SimulatedHost& from_;
  SimulatedHost& to_;
  const Mode mode_;
  std::vector<Message> messages_;
  ConnectionId from_id_ = 0, to_id_ = 0;
  uint64_t base_ = 0;
  size_t submitted_ = 0, posted_ = 0, sent_ = 0, received_ = 0;
  uint32_t unconsumed_ = 0;
  bool consuming_ = false;
};

// One connection with a flow each way.
struct Link {
  Mode mode;
  SimulatedHost *a, *b;
  Nonce nonce{};
  ConnectionId a_id = 0, b_id = 0;
  std::unique_ptr<Flow> to_b{}, to_a{};
  bool over() const { return to_b->done() && to_a->done(); }
};

class RandomRun {
 public:
  explicit RandomRun(uint64_t seed) : simulator_(seed) {}

  std::string run() {
    draw_network();
    draw_links();
    const bool done = simulator_.run(60 * kSecond, [this] {
      return !fault_.empty() || std::all_of(links_.begin(), links_.end(), [](const Link& link) { return link.over(); });
    });
    if (!fault_.empty()) return fault_;
    if (!done) return "not all requests were completed within a minute";
    for (Link& link : links_) {
      link.a->endpoint.close(link.a_id, simulator_.now);
      link.a->poll();
      if (simulator_.chance(0.5)) continue;
      link.b->endpoint.close(link.b_id, simulator_.now);
      link.b->poll();
      link.b_id = 0;
    }
    // Who did not close hears of it, and then closes.
    simulator_.run(5 * kSecond, [] { return false; });
    for (Link& link : links_) {
      if (link.b_id == 0) continue;
      if (!over_.count(link.b_id)) return "the peer's close was not heard";
      link.b->endpoint.close(link.b_id, simulator_.now);
      link.b->poll();
    }
    simulator_.run(10 * kSecond, [] { return false; });
    for (SimulatedHost* host : hosts_) {
      if (!host->kept.empty()) return "packets were kept";
      if (host->endpoint.next_ns() != UINT64_MAX) return "connections are left";
    }
    return fault_;
  }

 private:
  void draw_network() {
    static constexpr double kLoss[] = {0, 0, 0.001, 0.01, 0.05, 0.1};
    static constexpr uint64_t kDelay[] = {1 * kMicrosecond, 10 * kMicrosecond, 50 * kMicrosecond, kMillisecond};
    const auto rate = [this](auto& choices) { return choices[simulator_.below(std::size(choices))]; };
    simulator_.faults = {.loss = rate(kLoss),
                         .duplicate = rate(kLoss),
                         .reorder = rate(kLoss) * 3,
                         .flip = rate(kLoss),
                         .checksum = true};
    simulator_.shape.delay_ns = rate(kDelay);
    simulator_.shape.reorder_ns = 1 + simulator_.below(20 * simulator_.shape.delay_ns);
    simulator_.shape.bits_per_ns = simulator_.chance(0.3) ? 1 : 25;
    simulator_.shape.queue_bytes = 20'000 << simulator_.below(6);
    Options options;
    options.authenticate = simulator_.chance(0.3);
    options.secret = "secret";
    if (options.authenticate) simulator_.faults.checksum = false;
    if (simulator_.chance(0.3)) options.first_number = (uint64_t(1) << 32) - 10;
    options.paths = 1 + int(simulator_.below(3));
    options.stream_frames = 4u << simulator_.below(6);
    const size_t hosts = 2 + simulator_.below(2);
    for (size_t i = 0; i < hosts; ++i) {
      options.payload = simulator_.chance(0.5) ? 1440 : 8944;
      hosts_.push_back(&simulator_.add_host(options));
      payload_ = i == 0 ? options.payload : std::min(payload_, options.payload);
    }
  }
  void draw_links() {
    const size_t count = 1 + simulator_.below(4);
    for (size_t i = 0; i < count; ++i) {
      SimulatedHost* a = hosts_[simulator_.below(hosts_.size())];
      SimulatedHost* b = a;
      while (b == a) b = hosts_[simulator_.below(hosts_.size())];
      Link link{simulator_.chance(0.3) ? Mode::stream : Mode::message, a, b};
      link.nonce = b->endpoint.listen();
      const uint32_t most = link.mode == Mode::stream ? 200 : 40;
      link.to_b = std::make_unique<Flow>(simulator_, *a, *b, link.mode, simulator_.below(most), payload_);
      link.to_a = std::make_unique<Flow>(simulator_, *b, *a, link.mode, simulator_.below(most), payload_);
      link.a_id = a->endpoint.connect(address_of(b->number, 0), link.nonce, link.mode, simulator_.now);
      links_.push_back(std::move(link));
    }
    for (SimulatedHost* host : hosts_) {
      host->on_opened = [this, host](ConnectionId id, const Nonce* nonce) { opened(host, id, nonce); };
      host->on_completed = [this](ConnectionId, const Completion& done) {
        for (Link& link : links_)
          for (Flow* flow : {link.to_a.get(), link.to_b.get()})
            if (flow->owns(done.request)) return flow->completed(done, &fault_);
        fault_ = "a completion of an unknown request";
      };
      host->on_record = [this, host](ConnectionId id, const Record& record) {
        for (Link& link : links_) {
          if (link.a == host && link.a_id == id) return link.to_a->record(record, &fault_);
          if (link.b == host && link.b_id == id) return link.to_b->record(record, &fault_);
        }
      };
      host->on_failed = [this](ConnectionId id, Status status, const std::string& why) {
        over_.insert({id, status});
        if (status != Status::peer_closed) fault_ = "a connection failed: " + why;
      };
      host->poll();
    }
  }
  void opened(SimulatedHost* host, ConnectionId id, const Nonce* nonce) {
    for (size_t i = 0; i < links_.size(); ++i) {
      Link& link = links_[i];
      if (!(nonce ? link.b == host && link.nonce == *nonce : link.a_id == id && link.a == host)) continue;
      // Both directions start when both sides are there, from outside of the endpoints.
      if (nonce) link.b_id = id;
      if (nonce) simulator_.at(simulator_.now, [&link, i] {
        link.to_b->start(link.a_id, link.b_id, i * 10'000);
        link.to_a->start(link.b_id, link.a_id, i * 10'000 + 5'000);
      });
    }
  }

  Simulator simulator_;
  std::vector<SimulatedHost*> hosts_;
  std::vector<Link> links_;
  std::map<ConnectionId, Status> over_;
  uint32_t payload_ = 0;
  std::string fault_;
};

TEST(Simulator, RandomNetworksDeliverEveryMessage) {
  const uint64_t first = number_from("HARP_FIRST_SEED", 1), count = number_from("HARP_SEEDS", 500);
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::string fault = RandomRun(seed).run();
    ASSERT_EQ(fault, "") << "replay: HARP_SEEDS=1 HARP_FIRST_SEED=" << seed
                         << " harp_tests --gtest_filter=Simulator.RandomNetworksDeliverEveryMessage";
  }
}

// Senders with as much to send as goes, to one receiver; what each has brought there.
class Bulk {
 public:
  Bulk(Simulator& simulator, size_t senders, const Options& options) : simulator_(simulator) {
    receiver_ = &simulator.add_host(options);
    receiver_->on_opened = [this](ConnectionId id, const Nonce*) {
      flows_[id];
      simulator_.at(simulator_.now, [this, id] { post(id); });
    };
    receiver_->on_completed = [this](ConnectionId id, const Completion& done) {
      flows_[id].bytes += done.bytes;
      simulator_.at(simulator_.now, [this, id] { post(id); });
    };
    const Nonce nonce = receiver_->endpoint.listen();
    for (size_t i = 0; i < senders; ++i) {
      SimulatedHost& sender = simulator.add_host(options);
      const ConnectionId id = sender.endpoint.connect(address_of(1, 0), nonce, Mode::message, simulator.now);
      sender.on_completed = [this, &sender, id](ConnectionId, const Completion&) { send(sender, id); };
      for (int k = 0; k < 8; ++k) send(sender, id);
      sender.poll();
    }
  }
  std::vector<double> run(uint64_t ns) {
    for (auto& [id, flow] : flows_) flow.bytes = 0;
    simulator_.run(ns, [] { return false; });
    std::vector<double> bytes;
    for (const auto& [id, flow] : flows_) bytes.push_back(double(flow.bytes));
    return bytes;
  }
  uint64_t dropped() const { return receiver_->dropped; }

 private:
  static constexpr uint32_t kSlice = 128 << 10;
  struct Received {
    uint64_t bytes = 0;
    int posted = 0;
  };
  void post(ConnectionId id) {
    Received& flow = flows_[id];
    for (; flow.posted < 8; ++flow.posted)
      receiver_->endpoint.receive(id, to_.data(), kSlice, 1, simulator_.now);
    receiver_->endpoint.receive(id, to_.data(), kSlice, 1, simulator_.now);
    receiver_->poll();
  }
  void send(SimulatedHost& host, ConnectionId id) { host.endpoint.send(id, from_.data(), kSlice, 1, simulator_.now); }

  Simulator& simulator_;
  SimulatedHost* receiver_;
  std::map<ConnectionId, Received> flows_;
  std::vector<uint8_t> from_ = std::vector<uint8_t>(kSlice), to_ = std::vector<uint8_t>(kSlice);
};

double goodput(double loss, uint64_t delay_ns) {
  Simulator simulator(7);
  simulator.faults.loss = loss;
  simulator.shape.delay_ns = delay_ns;
  Bulk bulk(simulator, 1, {.receive_packets = 1024});
  bulk.run(20 * kMillisecond);
  return bulk.run(100 * kMillisecond).at(0);
}

TEST(Simulator, RareLossCostsLittle) {
  for (const uint64_t delay : {10 * kMicrosecond, 100 * kMicrosecond}) {
    const double none = goodput(0, delay);
    EXPECT_GE(none * 8 / 100e6, 0.85 * 10) << "of 10 Gbit/s";
    EXPECT_GE(goodput(0.001, delay), 0.95 * none) << delay;
    EXPECT_GE(goodput(0.01, delay), 0.7 * none) << delay;
  }
}

TEST(Simulator, IncastOfFifteenLosesNothingAndIsFair) {
  Simulator simulator(3);
  simulator.shape.queue_bytes = 512 << 10;
  Bulk bulk(simulator, 15, {.receive_packets = 1024});
  bulk.run(20 * kMillisecond);
  const std::vector<double> bytes = bulk.run(50 * kMillisecond);
  ASSERT_EQ(bytes.size(), 15u);
  const double sum = std::accumulate(bytes.begin(), bytes.end(), 0.0);
  const double squares = std::inner_product(bytes.begin(), bytes.end(), bytes.begin(), 0.0);
  EXPECT_GE(sum * sum / (15 * squares), 0.95) << "Jain's index";
  EXPECT_EQ(bulk.dropped(), 0u);
  EXPECT_GE(sum * 8 / 50e6, 8.5) << "of 10 Gbit/s";
}

}  // namespace
}  // namespace harp::test
