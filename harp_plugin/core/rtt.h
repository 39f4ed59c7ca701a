// Round-trip time, as TCP estimates it (RFC 6298), and what follows from it.
#pragma once
#include <algorithm>
#include <cstdint>

namespace harp {

class Rtt {
 public:
  void sample(uint64_t ns) {
    latest_ns_ = ns;
    least_ns_ = std::min(least_ns_, ns);
    if (smoothed_ns_ == 0) {
      smoothed_ns_ = ns;
      variation_ns_ = ns / 2;
      return;
    }
    const uint64_t difference = ns > smoothed_ns_ ? ns - smoothed_ns_ : smoothed_ns_ - ns;
    variation_ns_ = (3 * variation_ns_ + difference) / 4;
    smoothed_ns_ = (7 * smoothed_ns_ + ns) / 8;
  }
  bool known() const { return smoothed_ns_ != 0; }
  uint64_t smoothed_ns() const { return smoothed_ns_; }
  uint64_t least_ns() const { return known() ? least_ns_ : 0; }
  // Without an acknowledgement for so long, something is lost.
  uint64_t timeout_ns(uint64_t least_ns) const {
    return known() ? std::max(least_ns, smoothed_ns_ + 4 * variation_ns_) : std::max(least_ns, kUnknownNs);
  }
  // A packet is lost if one that was sent so much later has arrived (RFC 9002, 6.1.2).
  uint64_t reordering_ns() const { return std::max(smoothed_ns_, latest_ns_) * 9 / 8; }

 private:
  static constexpr uint64_t kUnknownNs = 10'000'000;
  uint64_t smoothed_ns_ = 0, variation_ns_ = 0, latest_ns_ = 0, least_ns_ = UINT64_MAX;
};

}  // namespace harp
