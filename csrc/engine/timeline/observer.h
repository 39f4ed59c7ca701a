// What the engine of a rank notes of its own work for the metrics of the job: steps, exposed time, bytes of the
// network, and on rank 0 what the ranks report.
#pragma once
#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/timeline/counters.h"
#include "engine/timeline/step_clock.h"
#include "net/peers.h"

namespace lightcc {

class Observer {
 public:
  Observer(Counters& counters, int ranks) : counters_(counters), reports_(size_t(ranks)) {}

  // ---- any thread
  void submitted(uint64_t now_ns) { last_submitted_ns_.store(now_ns, std::memory_order_relaxed); }
  // Nothing is in flight any more: the program may have waited since its last submission. Whether it did is not seen.
  void idle() { exposed_since(last_submitted_ns_.load(std::memory_order_relaxed)); }
  void exposed_since(uint64_t since_ns) {
    const uint64_t now = now_ns();
    if (now > since_ns) counters_.add(Counters::exposed_ns, now - since_ns);
  }
  // Calls on the fast path are timed only once somebody has looked at the counters, to spare the others the clock.
  void looked_at() { looked_at_.store(true, std::memory_order_relaxed); }
  bool times_fast_path() const { return looked_at_.load(std::memory_order_relaxed); }
  uint64_t sent_bytes(const Peers& peers, const std::string& transport) const {  // since begin()
    const uint64_t all = peers.sent_bytes(transport);
    return all - std::min<uint64_t>(all, transport == "tcp" ? tcp_bytes_before_ : plugin_bytes_before_);
  }
  std::string reported(int rank) {
    std::lock_guard lock(mutex_);
    return rank >= 0 && rank < int(reports_.size()) ? reports_[size_t(rank)] : "";
  }

  // ---- under the progress lock
  void begin(const Peers& peers) {  // what came before does not count
    tcp_bytes_before_ = peers.sent_bytes("tcp");
    plugin_bytes_before_ = peers.sent_bytes("harp") + peers.sent_bytes("plugin");  // it has one of them at most
  }
  bool begins_step(std::string_view name, int set) {  // an all-reduce with a name of the program's own
    const bool begins = steps_.begins(name, set);
    if (begins) counters_.count(Counters::steps);
    return begins;
  }
  void receive(int rank, std::string report) {
    std::lock_guard lock(mutex_);
    if (rank >= 0 && rank < int(reports_.size())) reports_[size_t(rank)] = std::move(report);
  }

 private:
  Counters& counters_;
  StepClock steps_;
  std::atomic<uint64_t> last_submitted_ns_{0}, tcp_bytes_before_{0}, plugin_bytes_before_{0};
  std::atomic<bool> looked_at_{false};
  std::mutex mutex_;
  std::vector<std::string> reports_;  // by rank, the last of each
};

}  // namespace lightcc
