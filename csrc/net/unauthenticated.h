// Connections whose other end has not authenticated. Anybody can open some, so at most so many pending ones are kept,
// and the oldest makes room for the next: a rank needs milliseconds for its proof, another process never brings it. A
// rank that was dropped all the same connects again. No I/O and no clock here.
#pragma once
#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>

namespace lightcc {

class PendingConnections {
 public:
  static constexpr size_t kSpare = 256;                  // kept beside one for each rank
  static constexpr uint64_t kGraceNs = 500'000'000;      // what a handshake may take where descriptors are short

  explicit PendingConnections(size_t ranks) : most_(ranks + kSpare) {}
  size_t most() const { return most_; }
  void add(uint64_t key, uint64_t now_ns) { at_[key] = order_.insert(order_.end(), {key, now_ns}); }
  void remove(uint64_t key) {  // it has proven itself, or it is gone
    const auto found = at_.find(key);
    if (found == at_.end()) return;
    order_.erase(found->second);
    at_.erase(found);
  }
  // The connection that has to go before another is added: the oldest, if there are as many as may be.
  std::optional<uint64_t> surplus() const {
    return order_.size() < most_ ? std::nullopt : std::optional(order_.front().key);
  }
  // The connection that has to go where no descriptor is left for another: the oldest, unless it may still be about to
  // prove itself.
  std::optional<uint64_t> overdue(uint64_t now_ns) const {
    const bool none = order_.empty() || now_ns - order_.front().since_ns < kGraceNs;
    return none ? std::nullopt : std::optional(order_.front().key);
  }

 private:
  struct Entry {
    uint64_t key, since_ns;
  };
  const size_t most_;
  std::list<Entry> order_;  // by age
  std::unordered_map<uint64_t, std::list<Entry>::iterator> at_;
};

// How many connected and did not authenticate, for messages.
struct UnauthenticatedConnections {
  uint64_t count = 0;
  std::string last;  // its address
  void add(const std::string& from) { ++count, last = from; }
  std::string text() const {  // a sentence, or nothing
    if (count == 0) return "";
    return " Unauthenticated connections, which do not know this job's secret or do not speak as lightcc does: " +
           std::to_string(count) + ", the last from " + last + ".";
  }
};

}  // namespace lightcc
