// The part that the ports mem and shm share: packets to and from many peers, each over a ring of its own. How rings
// come into being and end is the business of a Rendezvous.
//
// A payload that lies in a region which the peer can see is not copied: the slot names region and offset. Any other is
// copied into the slot, if it is short, or into a frame of the port's pool. A packet for which there is no slot or
// frame, or no such peer, is taken and lost: a peer that stands still keeps nobody else waiting.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "harp_plugin/port/done_counter.h"
#include "harp_plugin/port/frame_pool.h"
#include "harp_plugin/port/packet_ring.h"
#include "harp_plugin/port/port.h"
#include "harp_plugin/port/region.h"

namespace harp {

// Memory that a sender names in slots.
struct SentRegion {
  uint32_t id = 0;
  uintptr_t base = 0;
  size_t bytes = 0;
  std::shared_ptr<Region> memory = nullptr;  // mem has none
};

// To one peer. The Rendezvous that made it may derive from it.
struct SendLink {
  SendLink(const Address& to, PacketRing* shared, int doorbell) : to(to), ring(shared), bell(doorbell) {}
  virtual ~SendLink() = default;
  Address to;
  PacketSender ring;
  int bell;                     // an eventfd that wakes the peer
  std::vector<uint32_t> shown;  // ids of regions that the peer knows
  uint32_t last_shown = 0;      // the one found last
  size_t frames = 0;            // of the pool that are out
  bool gone = false;            // the peer is: to be dropped
};

// From one peer.
struct ReceiveLink {
  struct Seen {
    uint32_t id = 0;
    uintptr_t base = 0;
    size_t bytes = 0;
    std::optional<Mapping> mapping = {};  // mem has none
    uint32_t lent = 0;                    // packets
    bool forgotten = false;               // by the sender: it goes when nothing is lent
  };
  ReceiveLink(const Address& from, PacketRing* shared) : from(from), ring(shared), where(kRingSlots, kNowhere) {}
  virtual ~ReceiveLink() = default;
  Address from;
  PacketReceiver ring;
  std::vector<Seen> regions;    // places are used again; id 0 is a free one
  std::vector<uint32_t> where;  // for each slot that is lent: the place of its region, or kNowhere
  bool ended = false;           // the peer is gone: drained, then dropped once nothing is lent
  bool references_end = false;  // and so is the memory its packets refer to
  static constexpr uint32_t kNowhere = UINT32_MAX;
};

struct Links {
  std::vector<std::unique_ptr<SendLink>> senders;
  std::vector<std::unique_ptr<ReceiveLink>> receivers;  // by the upper half of RxPacket::frame; places may be empty
  void add(std::unique_ptr<ReceiveLink> link) {
    const auto place = std::find(receivers.begin(), receivers.end(), nullptr);
    (place == receivers.end() ? receivers.emplace_back() : *place) = std::move(link);
  }
};

// How links come and go. The port's thread calls; nothing here waits.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual std::unique_ptr<SendLink> connect(const Address& to) = 0;  // nullptr: there is nobody, or not now
  virtual bool show(SendLink&, const SentRegion&) = 0;               // false: not now; the payload is copied then
  virtual void hide(SendLink&, uint32_t region) = 0;                 // it was shown
  // Takes in links that have come, marks those that have ended. `awake`: after a sleep; else it may look only now and
  // then, if looking costs a system call.
  virtual void attend(Links&, bool awake) = 0;
  virtual int descriptor() const = 0;  // readable when a doorbell rings or attend() has something to do
};

class RingPort final : public Port, public RegionUser {
 public:
  struct RingCounters {  // of this port
    uint64_t lost = 0;       // no peer, slot or frame
    uint64_t copied = 0;     // payloads, into frames
    uint64_t referred = 0;   // payloads, not copied
    uint64_t malformed = 0;  // slots of peers
    uint64_t broken = 0;     // links of peers that broke the rules
  };
  // `frames` of payload and tag each are in `pool`.
  RingPort(Caps, std::unique_ptr<Rendezvous>, SentRegion pool, uint32_t frames);
  ~RingPort() override;

  const Caps& caps() const override { return caps_; }
  size_t tx(std::span<const TxPacket>) override;
  uint64_t tx_done() override;
  size_t rx(std::span<RxPacket>, std::span<const Expected>) override;
  void release(std::span<const RxPacket>) override;
  int descriptor() const override { return rendezvous_->descriptor(); }
  bool arm() override;
  void disarm() override;
  void add_region(std::shared_ptr<Region>) override;
  void remove_region(const Region&) override;
  void add_region(SentRegion);  // mem: the whole address space

  const RingCounters& counters() const { return counters_; }
  static constexpr uint32_t frame_bytes(uint32_t payload) { return (payload + kTagBytes + 63) / 64 * 64; }

 private:
  SendLink* link_to(const Address&);
  bool send(SendLink&, const TxPacket&);
  const SentRegion* region_of(SendLink&, const TxPacket&);
  void publish(SendLink&);
  void collect(SendLink&);
  void settle(const Sent&, SendLink&);
  void attend(bool awake);
  size_t receive(ReceiveLink&, uint32_t index, std::span<RxPacket>);
  bool resolve(ReceiveLink&, uint32_t number, const PacketSlot&, RxPacket&);
  void flush();
  void lower_flags();

  struct HashAddress {
    size_t operator()(const Address& address) const {
      return std::hash<std::string_view>()({reinterpret_cast<const char*>(address.bytes.data()), address.size});
    }
  };

  Caps caps_;
  std::unique_ptr<Rendezvous> rendezvous_;
  SentRegion pool_region_;
  FramePool pool_;
  std::vector<SentRegion> regions_;  // by base
  Links links_;
  std::unordered_map<Address, SendLink*, HashAddress> by_address_;
  SendLink* last_ = nullptr;   // where the last packet went
  size_t next_receiver_ = 0;   // the one that is asked first
  std::vector<uint32_t> to_flush_;  // receivers with released slots that the peer has not been shown
  DoneCounter done_;
  RingCounters counters_;
};

}  // namespace harp
