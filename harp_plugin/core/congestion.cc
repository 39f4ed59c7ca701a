#include "harp_plugin/core/congestion.h"

#include <algorithm>
#include <cmath>

namespace harp {

namespace {

constexpr double kMostDecrease = 0.5;
constexpr double kDelayGain = 0.8;        // Swift's beta
constexpr double kToleratedLoss = 0.02;
constexpr uint32_t kLossSample = 256;     // packets on which a small share can be told from chance
constexpr uint32_t kManyLost = 16;        // no chance, whatever the sample
constexpr uint64_t kForgetNs = 5 * kSecond;
constexpr double kFlowScaling = 4;        // a window of n packets tolerates target * (1 + kFlowScaling / sqrt(n))

}  // namespace

Congestion::Congestion(const Limits& limits)
    : limits_(limits), window_(limits.first_packets), slow_start_until_(limits.most_packets) {}

uint64_t Congestion::base_ns() const { return std::min(least_ns_, previous_least_ns_); }

// Small windows tolerate more delay, so that flows of a bottleneck come to the same share (Swift, 3.5).
uint64_t Congestion::target_ns() const {
  return uint64_t(double(limits_.target_ns) * (1 + kFlowScaling / std::sqrt(window_)));
}

void Congestion::acked(uint32_t packets, uint64_t rtt_ns, uint64_t now_ns, bool limited) {
  if (rtt_ns > 0) {
    if (now_ns - least_since_ns_ > kForgetNs) {
      previous_least_ns_ = least_ns_;
      least_ns_ = UINT64_MAX;
      least_since_ns_ = now_ns;
    }
    least_ns_ = std::min(least_ns_, rtt_ns);
    round_least_ns_ = std::min(round_least_ns_, rtt_ns);
    latest_rtt_ns_ = rtt_ns;
    // Doubling ends at the first sign of a queue: a round later it would be twice as long (HyStart).
    if (rtt_ns - base_ns() > limits_.target_ns / 2) slow_start_until_ = std::min(slow_start_until_, window_);
  }
  round_acked_ += packets;
  sample_acked_ += packets;
  round_limited_ |= limited;
  if (window_ < slow_start_until_ && limited) window_ = std::min(window_ + packets, double(limits_.most_packets));
  if (now_ns >= round_ends_ns_ && round_least_ns_ != UINT64_MAX) end_round(now_ns);
}

void Congestion::end_round(uint64_t now_ns) {
  const uint64_t delay = round_least_ns_ - std::min(round_least_ns_, base_ns()), target = target_ns();
  const double lost_share = double(sample_lost_) / (sample_lost_ + sample_acked_ + 1e-9);
  const bool enough = sample_acked_ + sample_lost_ >= kLossSample || sample_lost_ >= kManyLost;
  if (delay > target) {
    shrink(std::max(1 - kMostDecrease, 1 - kDelayGain * double(delay - target) / double(delay)));
  } else if (enough && lost_share > kToleratedLoss) {
    shrink(std::max(1 - kMostDecrease, 1 - lost_share));
  } else if (window_ >= slow_start_until_ && round_limited_) {
    // One packet a round at the target; up to an eighth of the window where there is no delay at all.
    const double room = 1 - double(delay) / double(target);
    window_ = std::min(window_ + 1 + window_ / 8 * room * room * room, double(limits_.most_packets));
  }
  if (enough) sample_acked_ = sample_lost_ = 0;
  before_timeout_ = 0;
  round_ends_ns_ = now_ns + latest_rtt_ns_;
  round_least_ns_ = UINT64_MAX;
  round_acked_ = 0;
  round_limited_ = false;
}

void Congestion::shrink(double factor) {
  window_ = std::max(window_ * factor, double(limits_.least_packets));
  slow_start_until_ = window_;
}

void Congestion::lost(uint32_t packets, uint64_t) { sample_lost_ += packets; }

void Congestion::timed_out(uint64_t) {
  slow_start_until_ = std::max(window_ / 2, double(limits_.least_packets));
  before_timeout_ = window_;
  window_ = limits_.least_packets;
  sample_acked_ = sample_lost_ = 0;
}

void Congestion::late_only() {
  if (before_timeout_ == 0) return;
  window_ = std::max(window_, before_timeout_);
  slow_start_until_ = std::min(slow_start_until_, window_);
  before_timeout_ = 0;
}

}  // namespace harp
