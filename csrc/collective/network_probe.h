// What is between hosts, measured by their ranks together: latency, and what they receive while they send as much. For
// the cost model (cost/cluster.h). Pairs of neighbouring hosts measure at the same time.
#pragma once
#include <cstdint>
#include <optional>

#include "base/deadline.h"
#include "net/peers.h"

namespace lightcc {

// Hosts stand in a ring, and each measures with both of its neighbours, one a round; two hosts need one round. Returns
// the host with which this one measures, or -1.
inline constexpr int kProbeRounds = 2;
int probe_partner(int host, int hosts, int round);

// One end of a link that nobody else uses; the rank at the other end makes the same calls. nullopt: the deadline is
// over, and the link cannot be used again. Only whoever holds the progress lock calls it.
class LinkProbe {
 public:
  LinkProbe(Peers& peers, Link& link, bool leads, const Deadline& deadline)
      : peers_(peers), link_(link), leads_(leads), deadline_(deadline) {}

  std::optional<double> latency_s();    // of 8 bytes one way; at the end that leads
  std::optional<double> bytes_per_s();  // in each direction, both at once

 private:
  template <class Ready> bool wait_until(Ready ready);
  bool send(uint64_t value);
  bool receive(uint64_t* value);
  bool exchange(size_t bytes);

  Peers& peers_;
  Link& link_;
  const bool leads_;
  const Deadline deadline_;
};

// What this rank's core copies, in bytes read and written.
double copied_bytes_per_s();

}  // namespace lightcc
