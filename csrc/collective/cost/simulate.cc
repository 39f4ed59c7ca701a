#include "collective/cost/simulate.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <queue>

#include "collective/cost/flows.h"

namespace lightcc {
namespace {

constexpr double kInstant = 1e-12;  // seconds: what lies so near happens together

class Simulation {
 public:
  Simulation(const Traffic& traffic, const Cluster& cluster, double together)
      : traffic_(traffic), resources_(cluster), sharing_(resources_), message_s_(cluster.message_s),
        together_(together), ranks_(size_t(traffic.ranks)) {
    for (const Round& round : traffic.rounds) {
      std::vector<int>& expected = expected_.emplace_back(ranks_.size(), 0);
      for (int rank = 0; rank < traffic.ranks; ++rank)
        for (const Message& message : messages_of(round, rank)) ++expected[size_t(message.to)];
    }
  }

  double run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) go_on(int(rank));
    while (!moving_.empty() || !arrivals_.empty()) {
      if (changed_) sharing_.share(moving_);
      changed_ = false;
      pass(next_s() - now_s_);
      finish_sends();
      deliver();
    }
    return now_s_;
  }

 private:
  struct Transfer : NetworkFlow {
    int from, to;
    int64_t round;  // of the sender, counted from its first
    double bytes_left;
    double delay_s;  // from its last byte's leaving to its arrival
  };
  struct Arrival {
    double at_s;
    int to;
    int64_t round;
    bool operator>(const Arrival& other) const { return at_s > other.at_s; }
  };
  struct Rank {
    size_t distinct = 0;       // of the traffic's rounds
    int64_t repeat = 0, round = 0;
    bool has_sent = false;
    int to_send = 0;
    std::deque<int> arrived;   // messages of this round, and of those to come
  };

  const std::vector<Message>& messages_of(const Round& round, int rank) {
    messages_.clear();
    round.messages(rank, &messages_);
    return messages_;
  }

  double next_s() const {
    double next = arrivals_.empty() ? std::numeric_limits<double>::infinity() : arrivals_.top().at_s;
    for (const NetworkFlow* flow : moving_) {
      const auto& transfer = static_cast<const Transfer&>(*flow);
      next = std::min(next, now_s_ + transfer.bytes_left / transfer.bytes_per_s);
    }
    return next;
  }

  void pass(double seconds) {
    now_s_ += seconds;
    for (NetworkFlow* flow : moving_) static_cast<Transfer*>(flow)->bytes_left -= flow->bytes_per_s * seconds;
  }

  void finish_sends() {
    const auto is_moving = [&](const NetworkFlow* flow) {
      return static_cast<const Transfer*>(flow)->bytes_left > flow->bytes_per_s * kInstant;
    };
    const auto sent = std::stable_partition(moving_.begin(), moving_.end(), is_moving);
    const std::vector<NetworkFlow*> done(sent, moving_.end());
    moving_.erase(sent, moving_.end());
    changed_ |= !done.empty();
    for (NetworkFlow* flow : done) {
      const auto& transfer = static_cast<const Transfer&>(*flow);
      arrivals_.push({now_s_ + transfer.delay_s, transfer.to, transfer.round});
      --ranks_[size_t(transfer.from)].to_send;
      const int from = transfer.from;
      free_.push_back(static_cast<Transfer*>(flow));
      go_on(from);
    }
  }

  void deliver() {
    while (!arrivals_.empty() && arrivals_.top().at_s <= now_s_ + kInstant) {
      const Arrival arrival = arrivals_.top();
      arrivals_.pop();
      Rank& rank = ranks_[size_t(arrival.to)];
      const size_t ahead = size_t(arrival.round - rank.round);
      if (rank.arrived.size() <= ahead) rank.arrived.resize(ahead + 1);
      ++rank.arrived[ahead];
      go_on(arrival.to);
    }
  }

  void go_on(int number) {
    Rank& rank = ranks_[size_t(number)];
    while (rank.distinct < traffic_.rounds.size()) {
      if (!rank.has_sent) send(number);
      const int arrived = rank.arrived.empty() ? 0 : rank.arrived.front();
      if (rank.to_send > 0 || arrived < expected_[rank.distinct][size_t(number)]) return;
      if (!rank.arrived.empty()) rank.arrived.pop_front();
      rank.has_sent = false;
      ++rank.round;
      if (++rank.repeat < traffic_.rounds[rank.distinct].repeats) continue;
      rank.repeat = 0;
      ++rank.distinct;
    }
  }

  void send(int number) {
    Rank& rank = ranks_[size_t(number)];
    rank.has_sent = true;
    for (const Message& message : messages_of(traffic_.rounds[rank.distinct], number)) {
      Transfer* transfer = allocate();
      *transfer = {{resources_.path(number, message.to, message.added)}, number, message.to, rank.round,
                   message.bytes, 0};
      transfer->delay_s = transfer->path.latency_s + ++rank.to_send * message_s_;
      for (int use = 0; use < transfer->path.count; ++use) transfer->path.uses[use].weight *= together_;
      moving_.push_back(transfer);
    }
    changed_ |= rank.to_send > 0;
  }

  Transfer* allocate() {
    if (free_.empty()) return all_.emplace_back(std::make_unique<Transfer>()).get();
    Transfer* transfer = free_.back();
    free_.pop_back();
    return transfer;
  }

  const Traffic& traffic_;
  const Resources resources_;
  FairSharing sharing_;
  const double message_s_, together_;
  std::vector<std::vector<int>> expected_;  // messages, by distinct round and rank
  std::vector<Rank> ranks_;
  std::vector<NetworkFlow*> moving_;
  std::priority_queue<Arrival, std::vector<Arrival>, std::greater<>> arrivals_;
  std::vector<std::unique_ptr<Transfer>> all_;
  std::vector<Transfer*> free_;
  std::vector<Message> messages_;
  double now_s_ = 0;
  bool changed_ = false;
};

}  // namespace

double simulate(const Traffic& traffic, const Cluster& cluster, double together) {
  return Simulation(traffic, cluster, together).run();
}

}  // namespace lightcc
