// How many packets may be in flight: a window steered by delay (Kumar et al., Swift, SIGCOMM 2020), which loss alone
// does not shrink while it is rare. Pure: time is a parameter.
//
// Once a round (an RTT):
//   delay over the target    the window shrinks in proportion to the excess, by half at most
//   more than 2 % lost       it shrinks by the share that was lost, by half at most
//   neither                  it grows: doubles until the first congestion, then by more the less delay and loss
// Delay is the least round trip of the round over the least of the last ten seconds, so that one reader that was not
// scheduled for a moment does not look like a full queue.
//
// A flow that began while a queue stood takes that queue for distance. So, where delay stands for many rounds, the
// window closes for two of them: the queue that is the flow's own drains, and what is left is the distance. Then the
// window comes back as fast as acknowledgements do.
#pragma once
#include <cstdint>

#include "harp_plugin/core/options.h"

namespace harp {

class Congestion {
 public:
  struct Limits {
    uint32_t most_packets;
    uint32_t least_packets = 2;
    uint32_t first_packets = 10;
    uint64_t target_ns = 100 * kMicrosecond;
  };
  explicit Congestion(const Limits&);

  // rtt_ns: of the newest of them, 0 if there is no sample. limited: the window was what held the sender back.
  void acked(uint32_t packets, uint64_t rtt_ns, uint64_t now_ns, bool limited);
  void lost(uint32_t packets, uint64_t now_ns);
  void timed_out(uint64_t now_ns);
  void late_only();  // what timed_out() was about has arrived after all: the window is as before (Eifel, RFC 4015)
  uint32_t window() const { return uint32_t(window_); }

 private:
  void sample(uint64_t rtt_ns, uint64_t now_ns);
  void end_round(uint64_t now_ns);
  void drain(uint64_t now_ns);
  void drained(uint64_t rtt_ns, uint64_t now_ns);
  void begin_round(uint64_t now_ns);
  void shrink(double factor);
  uint64_t target_ns() const;
  uint64_t base_ns() const;

  Limits limits_;
  double window_;
  double slow_start_until_;
  double before_timeout_ = 0;  // the window, while it may come back
  double restore_to_ = 0;      // the window before it was closed to drain; 0: it is back
  double lost_share_ = 0;      // of the last packets, those of older rounds counting less
  uint64_t round_ends_ns_ = 0, round_least_ns_ = UINT64_MAX, latest_rtt_ns_ = 0;
  uint64_t least_ns_ = UINT64_MAX, previous_least_ns_ = UINT64_MAX, least_since_ns_ = 0;
  uint64_t drained_ns_ = 0;  // packets that are sent from then on meet no queue of ours; 0: not draining
  uint32_t round_acked_ = 0, round_lost_ = 0;
  uint32_t standing_rounds_ = 0, drain_after_rounds_;
  bool round_limited_ = false;
};

}  // namespace harp
