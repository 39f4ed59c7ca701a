#include "harp_plugin/port/mem.h"

#include <sys/eventfd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

namespace harp {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;
using lightcc::system_error;

namespace {

constexpr uint32_t kAddressSpace = 1;  // as a region
constexpr uint32_t kPool = 2;
constexpr uint32_t kFrames = 1024;  // for payloads with a tag: only these are copied

struct Inbox;

// A ring from one port to one other, and what keeps its memory alive on both sides.
struct MemPair {
  Mapping ring = Mapping::anonymous(sizeof(PacketRing));
  std::shared_ptr<Mapping> pool;  // the sender's
  std::shared_ptr<Inbox> from, to;
  std::atomic<bool> sender_gone{false};
  std::atomic<bool> receiver_gone{false};
  PacketRing* shared() const { return reinterpret_cast<PacketRing*>(ring.data()); }
};

// What others tell a port.
struct Inbox {
  Address address;
  Fd bell{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<uint64_t> changes{0};               // of what follows, and of the pairs' flags
  std::vector<std::shared_ptr<MemPair>> arrived;  // guarded by the network's mutex
  void notify() {
    changes.fetch_add(1, std::memory_order_release);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(bell.get(), &one, sizeof one);  // full: readable already
  }
};

struct MemSendLink final : SendLink {
  explicit MemSendLink(std::shared_ptr<MemPair> p)
      : SendLink(p->to->address, p->shared(), p->to->bell.get()), pair(std::move(p)) {}
  ~MemSendLink() override {
    pair->sender_gone = true;
    pair->to->notify();
  }
  std::shared_ptr<MemPair> pair;
};

struct MemReceiveLink final : ReceiveLink {
  explicit MemReceiveLink(std::shared_ptr<MemPair> p)
      : ReceiveLink(p->from->address, p->shared()), pair(std::move(p)) {
    regions.push_back({.id = kAddressSpace, .base = 0, .bytes = SIZE_MAX});
    regions.push_back({.id = kPool, .base = reinterpret_cast<uintptr_t>(pair->pool->data()),
                       .bytes = pair->pool->bytes()});
  }
  ~MemReceiveLink() override {
    pair->receiver_gone = true;
    pair->from->notify();
  }
  std::shared_ptr<MemPair> pair;
};

Address address_of(uint64_t id) {
  Address address;
  std::memcpy(address.bytes.data(), &id, sizeof id);
  address.size = sizeof id;
  return address;
}

uint64_t id_of(const Address& address) {
  uint64_t id = 0;  // nobody's
  if (address.size == sizeof id) std::memcpy(&id, address.bytes.data(), sizeof id);
  return id;
}

}  // namespace

// The mutex is taken when ports and pairs come and go, never for a packet.
class MemNetwork {
 public:
  std::shared_ptr<Inbox> join() {
    auto inbox = std::make_shared<Inbox>();
    if (!inbox->bell) throw system_error("creating an eventfd");
    const std::lock_guard lock(mutex_);
    inbox->address = address_of(++last_id_);
    members_[last_id_] = inbox;
    return inbox;
  }
  void leave(Inbox& inbox) {
    const std::lock_guard lock(mutex_);
    members_.erase(id_of(inbox.address));
    for (const auto& pair : std::exchange(inbox.arrived, {})) {  // nobody will take these in
      pair->receiver_gone = true;
      pair->from->notify();
    }
  }
  std::shared_ptr<MemPair> pair(std::shared_ptr<Inbox> from, std::shared_ptr<Mapping> pool, const Address& to) {
    const std::lock_guard lock(mutex_);
    const auto member = members_.find(id_of(to));
    if (member == members_.end()) return nullptr;
    auto pair = std::make_shared<MemPair>();
    pair->from = std::move(from);
    pair->pool = std::move(pool);
    pair->to = member->second;
    pair->to->arrived.push_back(pair);
    pair->to->notify();
    return pair;
  }
  std::vector<std::shared_ptr<MemPair>> arrivals(Inbox& inbox) {
    const std::lock_guard lock(mutex_);
    return std::exchange(inbox.arrived, {});
  }

 private:
  std::mutex mutex_;
  uint64_t last_id_ = 0;
  std::map<uint64_t, std::shared_ptr<Inbox>> members_;
};

std::shared_ptr<MemNetwork> make_mem_network() { return std::make_shared<MemNetwork>(); }

namespace {

class MemRendezvous final : public Rendezvous {
 public:
  MemRendezvous(std::shared_ptr<MemNetwork> network, std::shared_ptr<Inbox> inbox, std::shared_ptr<Mapping> pool)
      : network_(std::move(network)), inbox_(std::move(inbox)), pool_(std::move(pool)) {}
  ~MemRendezvous() override { network_->leave(*inbox_); }

  std::unique_ptr<SendLink> connect(const Address& to) override {
    auto pair = network_->pair(inbox_, pool_, to);
    if (!pair) return nullptr;
    auto link = std::make_unique<MemSendLink>(std::move(pair));
    link->shown = {kAddressSpace, kPool};
    return link;
  }
  bool show(SendLink&, const SentRegion&) override { return true; }
  void hide(SendLink&, uint32_t) override {}

  void attend(Links& links, bool awake) override {
    if (!awake && inbox_->changes.load(std::memory_order_acquire) == seen_) return;
    uint64_t rung;
    [[maybe_unused]] const ssize_t got = read(inbox_->bell.get(), &rung, sizeof rung);  // fails if it has not rung
    // After the bell was emptied: whoever changes something from here on rings it again.
    const uint64_t changes = inbox_->changes.load(std::memory_order_acquire);
    if (changes == seen_) return;
    seen_ = changes;
    for (auto& pair : network_->arrivals(*inbox_)) links.add(std::make_unique<MemReceiveLink>(std::move(pair)));
    for (const auto& link : links.senders) {
      if (static_cast<MemSendLink&>(*link).pair->receiver_gone) link->gone = true;
    }
    for (const auto& link : links.receivers) {
      if (link && static_cast<MemReceiveLink&>(*link).pair->sender_gone) link->ended = link->references_end = true;
    }
  }
  int descriptor() const override { return inbox_->bell.get(); }

 private:
  std::shared_ptr<MemNetwork> network_;
  std::shared_ptr<Inbox> inbox_;
  std::shared_ptr<Mapping> pool_;
  uint64_t seen_ = 0;
};

}  // namespace

std::unique_ptr<RingPort> open_mem(std::shared_ptr<MemNetwork> network, uint32_t payload) {
  if (payload == 0 || payload > 65520 || payload % kOffsetUnit) {
    throw Error(Code::invalid_argument, "a mem port with packets of " + std::to_string(payload) + " bytes");
  }
  auto inbox = network->join();
  const Caps caps{.name = "mem",
                  .payload = payload,
                  .receive_packets = kRingSlots / 2,
                  .holds_payload = true,
                  .places_payload = false,
                  .zero_copy = true,
                  .locals = 1,
                  .speed_mbit = 0,
                  .address = inbox->address};
  auto pool = std::make_shared<Mapping>(Mapping::anonymous(size_t{kFrames} * RingPort::frame_bytes(payload)));
  const SentRegion pool_region{kPool, reinterpret_cast<uintptr_t>(pool->data()), pool->bytes()};
  auto rendezvous = std::make_unique<MemRendezvous>(std::move(network), std::move(inbox), std::move(pool));
  auto port = std::make_unique<RingPort>(caps, std::move(rendezvous), pool_region, kFrames);
  port->add_region(SentRegion{kAddressSpace, 0, SIZE_MAX});
  return port;
}

}  // namespace harp
