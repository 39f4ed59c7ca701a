#include "harp_plugin/core/congestion.h"

#include <algorithm>
#include <cmath>

namespace harp {

namespace {

constexpr double kMostDecrease = 0.5;
constexpr double kDelayGain = 0.8;       // Swift's beta
constexpr double kToleratedLoss = 0.02;
constexpr double kLossMemory = 512;      // packets: enough to tell a tolerated share from chance
constexpr uint64_t kForgetNs = 5 * kSecond;
constexpr double kFlowScaling = 4;       // a window of n packets tolerates target * (1 + kFlowScaling / sqrt(n))
constexpr double kDrainedWindow = 4;
constexpr uint32_t kFirstDrainRounds = 16, kMostDrainRounds = 1024;

}  // namespace

Congestion::Congestion(const Limits& limits)
    : limits_(limits), window_(std::min(limits.first_packets, limits.most_packets)),
      slow_start_until_(limits.most_packets), drain_after_rounds_(kFirstDrainRounds) {}

uint64_t Congestion::base_ns() const { return std::min(least_ns_, previous_least_ns_); }

// Small windows tolerate more delay, so that flows of a bottleneck come to the same share (Swift, 3.5).
uint64_t Congestion::target_ns() const {
  return uint64_t(double(limits_.target_ns) * (1 + kFlowScaling / std::sqrt(window_)));
}

void Congestion::acked(uint32_t packets, uint64_t rtt_ns, uint64_t now_ns, bool limited) {
  round_acked_ += packets;
  if (rtt_ns > 0) sample(rtt_ns, now_ns);
  if (drained_ns_ != 0) return drained(rtt_ns, now_ns);
  if (restore_to_ != 0) {
    window_ = std::min(window_ + packets, restore_to_);
    if (window_ < restore_to_) return;
    restore_to_ = 0;
    return begin_round(now_ns);
  }
  // Doubling ends at the first sign of a queue: a round later it would be twice as long (HyStart).
  if (rtt_ns > base_ns() + limits_.target_ns / 2) slow_start_until_ = std::min(slow_start_until_, window_);
  round_limited_ |= limited;
  if (window_ < slow_start_until_ && limited) window_ = std::min(window_ + packets, double(limits_.most_packets));
  if (now_ns >= round_ends_ns_ && round_least_ns_ != UINT64_MAX) end_round(now_ns);
}

void Congestion::sample(uint64_t rtt_ns, uint64_t now_ns) {
  if (now_ns - least_since_ns_ > kForgetNs) {
    previous_least_ns_ = least_ns_;
    least_ns_ = UINT64_MAX;
    least_since_ns_ = now_ns;
  }
  least_ns_ = std::min(least_ns_, rtt_ns);
  round_least_ns_ = std::min(round_least_ns_, rtt_ns);
  latest_rtt_ns_ = rtt_ns;
}

void Congestion::end_round(uint64_t now_ns) {
  const uint64_t delay = round_least_ns_ - std::min(round_least_ns_, base_ns()), target = target_ns();
  const double packets = double(round_acked_) + round_lost_;
  lost_share_ += std::min(1.0, packets / kLossMemory) * (round_lost_ / std::max(packets, 1.0) - lost_share_);
  standing_rounds_ = delay > limits_.target_ns / 2 ? standing_rounds_ + 1 : 0;
  if (delay > target) {
    shrink(std::max(1 - kMostDecrease, 1 - kDelayGain * double(delay - target) / double(delay)));
  } else if (lost_share_ > kToleratedLoss) {
    shrink(std::max(1 - kMostDecrease, 1 - lost_share_));
  } else if (window_ >= slow_start_until_ && round_limited_) {
    // One packet a round at the target; up to an eighth of the window where there is neither delay nor loss.
    const double room = 1 - double(delay) / double(target), luck = 1 - lost_share_ / kToleratedLoss;
    window_ = std::min(window_ + 1 + window_ / 8 * room * room * room * luck, double(limits_.most_packets));
  }
  before_timeout_ = 0;
  begin_round(now_ns);
  if (standing_rounds_ >= drain_after_rounds_) drain(now_ns);
}

void Congestion::begin_round(uint64_t now_ns) {
  round_ends_ns_ = now_ns + latest_rtt_ns_;
  round_least_ns_ = UINT64_MAX;
  round_limited_ = false;
  round_acked_ = round_lost_ = 0;
}

void Congestion::drain(uint64_t now_ns) {
  standing_rounds_ = 0;
  drain_after_rounds_ = std::min(drain_after_rounds_ * 4, kMostDrainRounds);
  if (window_ <= kDrainedWindow) return;
  restore_to_ = window_;
  window_ = kDrainedWindow;
  drained_ns_ = now_ns + latest_rtt_ns_;
}

void Congestion::drained(uint64_t rtt_ns, uint64_t now_ns) {
  if (rtt_ns != 0 && now_ns - std::min(now_ns, rtt_ns) >= drained_ns_) drained_ns_ = 0;
}

void Congestion::shrink(double factor) {
  window_ = std::max(window_ * factor, double(limits_.least_packets));
  slow_start_until_ = window_;
}

void Congestion::lost(uint32_t packets, uint64_t) { round_lost_ += packets; }

void Congestion::timed_out(uint64_t) {
  before_timeout_ = std::max(window_, restore_to_);
  slow_start_until_ = std::max(before_timeout_ / 2, double(limits_.least_packets));
  window_ = limits_.least_packets;
  restore_to_ = 0;
  drained_ns_ = 0;
  lost_share_ = 0;
  round_acked_ = round_lost_ = 0;
}

void Congestion::late_only() {
  if (before_timeout_ == 0) return;
  window_ = std::max(window_, before_timeout_);
  slow_start_until_ = std::min(slow_start_until_, window_);
  before_timeout_ = 0;
}

}  // namespace harp
