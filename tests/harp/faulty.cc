#include "harp/faulty.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "harp_plugin/port/region.h"

namespace harp {

namespace {

constexpr size_t kMostAtOnce = 64;

// A packet of our own, with copies of all that it points to.
struct Held {
  TxPacket packet;
  std::vector<uint8_t> payload;
  Address to;
  uint64_t after_number = 0;  // of the packet that has to pass first
};

using Queue = std::deque<std::unique_ptr<Held>>;

// Copies that a port was still reading from when it was closed. A receiver in the same process may hold them for as
// long as it likes and nobody would tell us, so they stay for good, where a leak checker finds them.
struct Retired {
  Queue copies;
  Retired* next;
};
std::atomic<Retired*> retired{nullptr};

void retire(Queue copies) {
  auto* entry = new Retired{std::move(copies), retired.load()};
  while (!retired.compare_exchange_weak(entry->next, entry)) {
  }
}

class Faulty final : public FaultyPort, public RegionUser {
 public:
  Faulty(std::unique_ptr<Port> port, const Faults& faults, std::function<uint64_t()> now)
      : port_(std::move(port)), faults_(faults), now_(std::move(now)), random_(faults.seed), caps_(port_->caps()) {
    caps_.name = "faulty " + caps_.name;
    caps_.holds_payload = false;  // it keeps copies
    caps_.zero_copy = false;
  }
  ~Faulty() override {
    reap();
    if (given_ > 0) retire(std::move(sending_));
  }

  const Caps& caps() const override { return caps_; }
  size_t tx(std::span<const TxPacket> packets) override {
    const uint64_t now = now_();
    for (const TxPacket& packet : packets) take(packet, now);
    pass(now);
    return packets.size();
  }
  uint64_t tx_done() override {
    pass(now_());
    reap();
    return taken_;
  }
  size_t rx(std::span<RxPacket> packets, std::span<const Expected> expected) override {
    pass(now_());
    reap();
    return port_->rx(packets, expected);
  }
  void release(std::span<const RxPacket> packets) override { port_->release(packets); }
  // While packets are held it has to be called again in time, which no descriptor can promise.
  int descriptor() const override { return faults_.delay_ns + faults_.jitter_ns > 0 ? -1 : port_->descriptor(); }
  bool arm() override {
    pass(now_());
    return port_->arm();
  }
  void disarm() override { port_->disarm(); }
  const FaultCounters& counters() const override { return counters_; }
  void add_region(std::shared_ptr<Region>) override {}  // it sends copies
  void remove_region(const Region&) override {}

 private:
  bool dice(double probability) {
    return probability > 0 && std::generate_canonical<double, 32>(random_) < probability;
  }

  void take(const TxPacket& packet, uint64_t now) {
    ++taken_;
    ++counters_.sent;
    if (dice(faults_.loss)) {
      ++counters_.lost;
      return;
    }
    const int copies = dice(faults_.duplicate) ? 2 : 1;
    counters_.duplicated += copies == 2;
    for (int i = 0; i < copies; ++i) hold(packet, now);
  }

  void hold(const TxPacket& packet, uint64_t now) {
    if (delayed_.size() + sending_.size() + let_pass_.size() >= kMostHeld) {
      ++counters_.overflowed;
      return;
    }
    auto held = std::make_unique<Held>();
    held->packet = packet;
    held->to = *packet.to;
    held->packet.to = &held->to;
    if (packet.payload_bytes > 0) held->payload.assign(packet.payload, packet.payload + packet.payload_bytes);
    held->packet.payload = held->payload.data();
    if (dice(faults_.flip)) flip(*held);
    if (dice(faults_.reorder)) {
      ++counters_.reordered;
      held->after_number = taken_ + kReorderPackets;
      let_pass_.push_back(std::move(held));
      return;
    }
    const uint64_t jitter = faults_.jitter_ns ? random_() % (faults_.jitter_ns + 1) : 0;
    delayed_.emplace(now + faults_.delay_ns + jitter, std::move(held));  // equal times keep their order
  }

  void flip(Held& held) {
    TxPacket& packet = held.packet;
    const size_t tag_bytes = packet.tagged ? kTagBytes : 0;
    const size_t bytes = packet.head_bytes + held.payload.size() + tag_bytes;
    const size_t bit = random_() % (bytes * 8);
    size_t at = bit / 8;
    const auto mask = static_cast<uint8_t>(1u << bit % 8);
    ++counters_.flipped;
    if (at < packet.head_bytes) {
      packet.head[at] ^= mask;
    } else if (at -= packet.head_bytes; at < held.payload.size()) {
      held.payload[at] ^= mask;
    } else {
      packet.tag[at - held.payload.size()] ^= mask;
    }
  }

  // Hands on what is due, in order of time.
  void pass(uint64_t now) {
    while (!let_pass_.empty() && let_pass_.front()->after_number <= taken_) {
      delayed_.emplace(now + faults_.delay_ns, std::move(let_pass_.front()));
      let_pass_.pop_front();
    }
    while (!delayed_.empty() && delayed_.begin()->first <= now) {
      sending_.push_back(std::move(delayed_.begin()->second));
      delayed_.erase(delayed_.begin());
    }
    while (given_ < sending_.size()) {
      std::array<TxPacket, kMostAtOnce> batch;
      const size_t count = std::min(kMostAtOnce, sending_.size() - given_);
      for (size_t i = 0; i < count; ++i) batch[i] = sending_[given_ + i]->packet;
      const size_t accepted = port_->tx(std::span(batch).first(count));
      given_ += accepted;
      if (accepted < count) return;
    }
  }

  // Frees the copies that the port below reads no more.
  void reap() {
    for (const uint64_t done = port_->tx_done(); reaped_ < done; ++reaped_) {
      sending_.pop_front();
      --given_;
    }
  }

  std::unique_ptr<Port> port_;
  const Faults faults_;
  std::function<uint64_t()> now_;
  std::mt19937_64 random_;
  Caps caps_;
  FaultCounters counters_;
  uint64_t taken_ = 0;
  std::multimap<uint64_t, std::unique_ptr<Held>> delayed_;  // by the time when they go on
  Queue let_pass_;                                          // wait for later ones
  Queue sending_;  // the first given_ are the port's until it has counted them
  size_t given_ = 0;
  uint64_t reaped_ = 0;
};

}  // namespace

std::unique_ptr<FaultyPort> open_faulty(std::unique_ptr<Port> port, const Faults& faults,
                                        std::function<uint64_t()> now) {
  return std::make_unique<Faulty>(std::move(port), faults, std::move(now));
}

}  // namespace harp
