// The window by script, and many windows in a model of one queue: what a flow sends waits behind what the others sent.
#include "harp_plugin/core/congestion.h"

#include <gtest/gtest.h>

#include <numeric>
#include <queue>
#include <random>
#include <vector>

#include "labels.h"

LABEL(alone);

namespace harp {
namespace {

constexpr uint64_t kRtt = 20 * kMicrosecond;

// One connection's acknowledgements, a round trip after another.
struct Script {
  explicit Script(Congestion::Limits limits) : congestion(limits) {}

  // A window's worth of packets comes back after rtt_ns, all but `lost` of them.
  void round(uint64_t rtt_ns, uint32_t lost = 0, bool limited = true) {
    now_ns += rtt_ns;
    const uint32_t packets = congestion.window();
    if (lost > 0) congestion.lost(lost, now_ns);
    for (uint32_t left = packets - std::min(lost, packets); left > 0;) {
      const uint32_t some = std::min(left, 16u);
      congestion.acked(some, rtt_ns, now_ns, limited);
      left -= some;
    }
  }
  void rounds(int count, uint64_t rtt_ns) {
    while (count-- > 0) round(rtt_ns);
  }

  Congestion congestion;
  uint64_t now_ns = kSecond;
};

TEST(Congestion, StartsWithTenPacketsAndDoublesWithoutDelay) {
  Script script({.most_packets = 1000});
  EXPECT_EQ(script.congestion.window(), 10u);
  script.round(kRtt);
  EXPECT_EQ(script.congestion.window(), 20u);
  script.rounds(3, kRtt);
  EXPECT_EQ(script.congestion.window(), 160u);
  script.rounds(10, kRtt);
  EXPECT_EQ(script.congestion.window(), 1000u) << "never more";
}

TEST(Congestion, NeverMoreThanTheMostAlsoAtTheStart) {
  Script script({.most_packets = 4});
  EXPECT_EQ(script.congestion.window(), 4u);
  script.rounds(5, kRtt);
  EXPECT_EQ(script.congestion.window(), 4u);
}

TEST(Congestion, GrowsOnlyWhereTheWindowWasTheLimit) {
  Script script({.most_packets = 1000});
  for (int i = 0; i < 100; ++i) script.round(kRtt, 0, false);
  EXPECT_EQ(script.congestion.window(), 10u);
}

TEST(Congestion, DelayOverTheTargetShrinksByHalfAtMost) {
  Script script({.most_packets = 1000});
  script.rounds(10, kRtt);
  script.round(kMillisecond);  // the first acknowledgement ends a round without delay
  script.round(kMillisecond);
  EXPECT_GE(script.congestion.window(), 500u);
  EXPECT_LT(script.congestion.window(), 600u);
  for (int i = 0; i < 15; ++i) {
    const uint32_t before = script.congestion.window();
    script.round(kMillisecond);
    ASSERT_GE(script.congestion.window(), before / 2);
    ASSERT_LE(script.congestion.window(), std::max(before, 3u));
  }
  EXPECT_LE(script.congestion.window(), 3u);
}

TEST(Congestion, OneLateReaderIsNotAQueue) {
  Script script({.most_packets = 1000});
  script.rounds(10, kRtt);
  for (int i = 0; i < 50; ++i) {
    script.now_ns += kRtt;
    for (int k = 0; k < 60; ++k)
      script.congestion.acked(16, k == 30 ? 5 * kMillisecond : kRtt, script.now_ns, true);
  }
  EXPECT_EQ(script.congestion.window(), 1000u) << "the least round trip of a round counts";
}

TEST(Congestion, RareLossChangesNothing) {
  for (const uint64_t seed : {1, 2, 3, 4, 5}) {
    std::mt19937_64 random(seed);
    Script script({.most_packets = 1000});
    script.rounds(10, kRtt);
    uint32_t least = 1000;
    for (int i = 0; i < 300; ++i) {
      script.round(kRtt, std::binomial_distribution<uint32_t>(script.congestion.window(), 0.01)(random));
      least = std::min(least, script.congestion.window());
    }
    EXPECT_GE(least, 900u) << "seed " << seed;
  }
}

TEST(Congestion, HeavyLossShrinksByItsShare) {
  Script script({.most_packets = 1000});
  script.rounds(10, kRtt);
  script.round(kRtt, 300);  // its first acknowledgement ends the round before: 300 of 1300 are lost
  EXPECT_NEAR(script.congestion.window(), 770, 20) << "in proportion";
  for (int i = 0; i < 20; ++i) {
    const uint32_t before = script.congestion.window();
    script.round(kRtt, before / 2);
    ASSERT_GE(script.congestion.window(), before / 2 - 1);
  }
  EXPECT_LT(script.congestion.window(), 20u) << "as long as it goes on";
}

TEST(Congestion, AfterATimeOutItBeginsAnewAndSlowsDownAtHalf) {
  Script script({.most_packets = 1000});
  script.rounds(10, kRtt);
  script.congestion.timed_out(script.now_ns);
  EXPECT_EQ(script.congestion.window(), 2u);
  script.rounds(7, kRtt);
  EXPECT_EQ(script.congestion.window(), 256u) << "doubling";
  script.rounds(2, kRtt);
  EXPECT_GE(script.congestion.window(), 500u);
  EXPECT_LT(script.congestion.window(), 650u) << "no longer";
}

TEST(Congestion, ALongerRouteIsLearnedInTenSeconds) {
  Script script({.most_packets = 1000});
  script.rounds(10, kRtt);
  const uint64_t end = script.now_ns + 12 * kSecond;
  while (script.now_ns < end) script.round(2 * kMillisecond);
  script.rounds(200, 2 * kMillisecond);
  EXPECT_EQ(script.congestion.window(), 1000u) << "the delay is the route's, not a queue's";
}

// Flows with as much to send as their windows allow, into one queue of a rate, with one delay.
class Bottleneck {
 public:
  struct Shape {
    double bytes_per_ns = 1.25;
    uint64_t queue_bytes = 512 << 10, rtt_ns = kRtt;
    double loss = 0;
    uint32_t most_packets = 1024;
    uint64_t seed = 1;
  };
  explicit Bottleneck(const Shape& shape) : shape_(shape), random_(shape.seed) {}

  void add(uint64_t from_ns) {
    flows_.push_back({Congestion({.most_packets = shape_.most_packets})});
    events_.push({from_ns, flows_.size() - 1, 0, Event::start});
  }
  void run_until(uint64_t end_ns) {
    while (!events_.empty() && events_.top().at_ns <= end_ns) {
      const Event event = events_.top();
      events_.pop();
      now_ns_ = event.at_ns;
      Flow& flow = flows_[event.flow];
      if (event.kind == Event::start) flow.started = true;
      if (event.kind != Event::start) --flow.in_flight;
      if (event.kind == Event::lost) flow.congestion.lost(1, now_ns_);
      if (event.kind == Event::acked) {
        ++flow.delivered;
        flow.congestion.acked(1, now_ns_ - event.sent_ns, now_ns_, true);
      }
      send(flow, event.flow);
    }
    now_ns_ = end_ns;
  }
  // Packets of each flow in this time.
  std::vector<double> measure(uint64_t ns) {
    for (Flow& flow : flows_) flow.delivered = 0;
    run_until(now_ns_ + ns);
    std::vector<double> packets;
    for (const Flow& flow : flows_) packets.push_back(double(flow.delivered));
    return packets;
  }
  uint64_t waiting_ns() const { return uint64_t(std::max(0.0, free_ns_ - double(now_ns_))); }
  uint64_t drops() const { return drops_; }

 private:
  static constexpr double kPacketBytes = 1490;
  struct Event {
    uint64_t at_ns;
    size_t flow;
    uint64_t sent_ns;
    enum Kind { start, acked, lost } kind;
    bool operator<(const Event& other) const { return at_ns > other.at_ns; }
  };
  struct Flow {
    Congestion congestion;
    uint32_t in_flight = 0;
    uint64_t delivered = 0;
    bool started = false;
  };
  void send(Flow& flow, size_t index) {
    while (flow.started && flow.in_flight < flow.congestion.window()) {
      ++flow.in_flight;
      const double waiting_ns = std::max(0.0, free_ns_ - double(now_ns_));
      const bool full = waiting_ns * shape_.bytes_per_ns + kPacketBytes > double(shape_.queue_bytes);
      drops_ += full;
      if (full || std::bernoulli_distribution(shape_.loss)(random_)) {  // later packets tell, a round trip later
        events_.push({now_ns_ + shape_.rtt_ns + uint64_t(waiting_ns), index, now_ns_, Event::lost});
        continue;
      }
      free_ns_ = double(now_ns_) + waiting_ns + kPacketBytes / shape_.bytes_per_ns;
      events_.push({uint64_t(free_ns_) + shape_.rtt_ns, index, now_ns_, Event::acked});
    }
  }

  const Shape shape_;
  std::mt19937_64 random_;
  std::vector<Flow> flows_;
  std::priority_queue<Event> events_;
  uint64_t now_ns_ = 0, drops_ = 0;
  double free_ns_ = 0;
};

double jain(const std::vector<double>& shares) {
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  return sum * sum / (double(shares.size()) * std::inner_product(shares.begin(), shares.end(), shares.begin(), 0.0));
}

double gbit_per_s(const std::vector<double>& packets, uint64_t ns) {
  return std::accumulate(packets.begin(), packets.end(), 0.0) * 1490 * 8 / double(ns);
}

TEST(Congestion, FifteenFlowsShareAQueueWithoutLoss) {
  Bottleneck queue({});
  for (int i = 0; i < 15; ++i) queue.add(0);
  queue.run_until(100 * kMillisecond);
  const auto packets = queue.measure(50 * kMillisecond);
  EXPECT_EQ(queue.drops(), 0u);
  EXPECT_GE(jain(packets), 0.95);
  EXPECT_GE(gbit_per_s(packets, 50 * kMillisecond), 9.8) << "the queue never runs empty";
}

// What a flow takes for distance is forgotten after a while, and must not be learned anew from the standing queue: each
// time all would add a target's worth of delay to it.
TEST(Congestion, TheQueueDoesNotGrowWithTheYears) {
  Bottleneck queue({.bytes_per_ns = 0.125, .queue_bytes = 4 << 20, .rtt_ns = 100 * kMicrosecond});
  for (uint64_t i = 0; i < 5; ++i) queue.add(i * 20 * kMillisecond);
  queue.run_until(kSecond);
  const uint64_t early = queue.waiting_ns();
  queue.run_until(60 * kSecond);
  EXPECT_LE(queue.waiting_ns(), 2 * early + 200 * kMicrosecond);
  EXPECT_GE(jain(queue.measure(kSecond)), 0.9);
  EXPECT_EQ(queue.drops(), 0u);
}

TEST(Congestion, AFlowThatComesLaterGetsItsShare) {
  Bottleneck queue({});
  queue.add(0);
  queue.add(20 * kMillisecond);
  queue.run_until(20 * kMillisecond);
  EXPECT_GE(gbit_per_s(queue.measure(kMillisecond), kMillisecond), 9.8) << "one alone takes all";
  queue.run_until(220 * kMillisecond);
  const auto packets = queue.measure(100 * kMillisecond);
  EXPECT_GE(jain(packets), 0.95) << packets[0] << " and " << packets[1];
  EXPECT_GE(gbit_per_s(packets, 100 * kMillisecond), 9.5);
}

TEST(Congestion, OnePercentOfRandomLossLeavesTheWindow) {
  for (const uint64_t rtt : {100 * kMicrosecond, 300 * kMicrosecond, kMillisecond}) {
    for (const uint64_t seed : {1, 2, 3}) {
      Bottleneck clean({.queue_bytes = 4 << 20, .rtt_ns = rtt, .most_packets = 512, .seed = seed});
      Bottleneck lossy({.queue_bytes = 4 << 20, .rtt_ns = rtt, .loss = 0.01, .most_packets = 512, .seed = seed});
      clean.add(0);
      lossy.add(0);
      clean.run_until(200 * kMillisecond);
      lossy.run_until(200 * kMillisecond);
      const double without = clean.measure(100 * kMillisecond)[0];
      EXPECT_GE(lossy.measure(100 * kMillisecond)[0], 0.9 * without) << rtt << " ns, seed " << seed;
    }
  }
}

TEST(Congestion, AQueueTooShortForTheTargetIsNotFloodedForLong) {
  Bottleneck queue({.queue_bytes = 32 << 10});
  queue.add(0);
  queue.run_until(20 * kMillisecond);
  const uint64_t before = queue.drops();
  const auto packets = queue.measure(100 * kMillisecond);
  EXPECT_LE(double(queue.drops() - before), 0.04 * packets[0]);
  EXPECT_GE(gbit_per_s(packets, 100 * kMillisecond), 8.0);
}

}  // namespace
}  // namespace harp
