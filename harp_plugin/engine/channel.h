// One connection between the application's thread and its engine: submissions one way, completions and records the
// other, without locks.
//
// Invariants:
//   1. A request belongs to the application while it is idle or done, to the engine while it is posted.
//   2. `why` and `over` are written before a request that failed with the connection is done.
//   3. A channel with submissions that the engine has not seen is queued, and then in the engine's list exactly once.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "harp_plugin/core/connection.h"
#include "harp_plugin/port/spsc_ring.h"

namespace harp {

class Channel;
class Engine;

struct alignas(kCacheLine) Request {
  enum Progress : uint32_t { idle, posted, done };
  std::atomic<uint32_t> state{idle};
  bool sends = false;
  Status status = Status::ok;
  uint64_t bytes = 0;
  Channel* channel = nullptr;
  Request* next_free = nullptr;

  void complete(const Completion& completion) {
    status = completion.status;
    bytes = completion.bytes;
    state.store(done, std::memory_order_release);
  }
};

struct Submission {
  uint8_t* data;
  uint32_t bytes;
  uint16_t request;  // its place among the channel's
  uint16_t sends;
};

struct LentRecord {
  const uint8_t* data;
  uint64_t bytes;
};

class Channel {
 public:
  Channel(Engine&, Mode, uint32_t stream_frames);

  // The application's thread.
  Request* submit(bool sends, uint8_t* data, uint32_t bytes);  // nullptr: too many requests
  void retire(Request&);                                        // one that is done
  std::optional<LentRecord> next_record();
  bool consume(uint64_t records);  // false: not so many are lent
  uint64_t lent() const { return taken_ - consumed_.load(std::memory_order_relaxed); }

  Status over() const { return static_cast<Status>(over_.load(std::memory_order_acquire)); }
  const std::string& why() const { return why_; }  // once it is over
  bool open() const { return record_bytes() != 0; }
  uint32_t record_bytes() const { return record_bytes_.load(std::memory_order_acquire); }

  Engine& engine;
  const Mode mode;
  const uint32_t forks;     // when it was made
  std::string peer;         // in words; written before another thread sees the channel
  void* context = nullptr;  // the front end's
  std::atomic<std::atomic<uint64_t>*> published{nullptr};  // where the engine stores Counters, or nullptr

 private:
  friend class Engine;
  static constexpr uint32_t kRequests = 2 * kMostRequests;

  // The application's.
  std::unique_ptr<Request[]> requests_;
  Request* free_[2] = {};
  uint64_t taken_ = 0;
  std::atomic<uint64_t> consumed_{0};

  // Between them.
  SpscRing<Submission> submissions_;
  std::unique_ptr<SpscRing<LentRecord>> records_;
  alignas(kCacheLine) std::atomic<bool> queued_{false};
  Channel* next_queued_ = nullptr;
  std::atomic<int> over_{0};
  std::atomic<uint32_t> record_bytes_{0};
  std::string why_;

  // The engine's.
  ConnectionId id_ = 0;  // 0: it is not opened yet, or could not be
  uint64_t consumed_seen_ = 0;
};

}  // namespace harp
