// What carries Links between ranks that share no memory. A transport is a folder of its own: one class that implements
// Transport and includes no other transport; bootstrap makes it, Peers asks it, nobody else knows which there are.
//
// 1. Nothing here blocks. Whoever has nothing to do sleeps on the descriptors of all transports at once (net/peers.h).
// 2. One thread at a time calls, whoever holds the progress lock; but descriptor(), arm() and busy() are for whoever is
//    about to sleep, beside it.
// 3. A peer that cannot be reached any more is an Error{peer_lost} that names it, from step() or from its links. So is
//    the end of the peer's epoch: an Error with the cause that the peer gave. What ends on this host is no peer's
//    fault: Error{internal}.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "net/link.h"

namespace lightcc {

struct NamedAddress {
  std::string transport, address;  // "tcp", "10.0.0.1:4711"; each transport reads its own
};

struct Contact {               // how to reach a rank
  std::string name;            // "rank 1 (pid 17) on host h"
  std::vector<NamedAddress> addresses{};           // of one transport there may be several, one a NIC

  const std::string* address(const std::string& transport) const {  // nullptr: it has none there
    for (const NamedAddress& one : addresses)
      if (one.transport == transport) return &one.address;
    return nullptr;
  }
};

struct Pollable {
  static constexpr uint64_t kForever = UINT64_MAX;
  virtual ~Pollable() = default;
  virtual int descriptor() const = 0;  // readable while step() has something to do; the same for life
  // Before a sleep on the descriptor: for how many ns at most step() is not needed. As ucp_worker_arm.
  virtual uint64_t arm() = 0;
  virtual bool busy() const = 0;       // step() has work in a while, though no rank here waits for anything
};

// Group and transport come and go together with the epoch and its process sets. A transport overrides what it has to
// do something about.
struct TransportLifecycle {
  virtual ~TransportLifecycle() = default;
  // No record follows, on any link. True once all that was committed has been delivered; call until then.
  virtual bool finish() { return true; }
  // Its links are gone. What they committed is still delivered, but for links that the peer has not used: they are
  // forgotten once both have retired the group.
  virtual void retire(int /*group*/) {}
  virtual void end(const Error& /*cause*/) {}    // the epoch has ended here: peers that use a link hear the cause
  virtual void close() {}                        // nothing but descriptor(), arm() and busy() may follow
  virtual void close_in_child() {}               // after fork(): the parent's descriptors stay the parent's
};

struct NetworkFaults {
  uint64_t retransmits = 0;                      // packets that were sent again
  uint64_t reconnects = 0;                       // connections that took the place of one that broke
};

class Transport : public Pollable, public TransportLifecycle {
 public:
  static constexpr int kControl = -1;            // the lane of messages; data lanes count from 0
  static constexpr int kPointToPoint = 1 << 20;  // the lane of sends and receives, behind all of collectives
  // This rank's end of a link; the peer makes the other one, before or after. `group` is never used twice.
  virtual std::unique_ptr<Link> link(int group, int lane, int peer) = 0;
  virtual bool step() = 0;                       // whatever can be done without waiting; true if anything moved
  virtual void flush() = 0;                      // what was committed since the last
  virtual uint64_t sent_bytes() const { return 0; }  // of records that were committed, if it counts them; any thread
  // What the network has cost so far. Whoever makes the steps.
  virtual NetworkFaults faults() { return {}; }
  // Nothing was ever heard of the peer. If it is not there, step() throws.
  virtual void probe(int /*peer*/) {}
  virtual void mark_left(int /*peer*/) {}        // it has shut down: that it is not there any more is no loss
};

}  // namespace lightcc
