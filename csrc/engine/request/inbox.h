// What the callers of an engine hand to it, until its next step takes it: requests, and which requests were refused on
// submission. It numbers automatic names, knows the names in use and refuses what must not begin. Any thread may call
// everything. Invariants:
// 1. take() gives out each request that add() has taken once, in their order.
// 2. After fail() or close() nothing is taken in any more.
// 3. A request is counted in in_flight() before take() can give it out.
// 4. A refused request uses up no automatic number.
#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/lifecycle/epoch_state.h"
#include "engine/request/names.h"
#include "engine/request/request.h"

namespace lightcc {

class Inbox {
 public:
  struct Refusal {
    size_t position;  // so many requests of the same take() were submitted before it
    int group;
    std::string key, why;
    bool contended;   // another thread of this rank had one of this name in flight
  };
  struct Contents {
    std::vector<RequestPtr> requests;
    std::vector<Refusal> refusals;
  };

  explicit Inbox(int rank) : rank_(rank) {}

  // Submission. Completes the key of an automatic name. Returns how many requests are in flight with this one, or that
  // its name is in use, or in use by another thread. Throws Error if nothing may begin.
  static constexpr int kInUse = 0, kContended = -1;
  int add(const RequestPtr&, bool has_handle);
  // This request was refused on submission. False: nobody waits for it any more, since the epoch is over.
  bool add_refusal(const Request&, const std::string& why, bool contended = false);
  // For calls on the fast path, which do not come through add() unless they have to wait.
  uint64_t draw_number(int group, Kind);
  bool is_held(int group, Kind, const char* name);          // by a request that is done (names.h)
  void adopt(Request&);                              // from now on it is in flight and has its name

  bool full() const { return full_.load(std::memory_order_seq_cst); }
  Contents take();
  int in_flight() const { return in_flight_.load(std::memory_order_seq_cst); }

  // Its request is done. True: its name stays in use for a while.
  bool release_name(const Request&);
  void give_back(const Request&);                          // its handle
  int finished() { return in_flight_.fetch_sub(1) - 1; }   // how many are still in flight

  // Other members have used this automatic name without this rank: its own numbers go on behind it.
  void skip_name(int group, const std::string& key);
  void forget_group(int group);
  void end_join(bool all_have_joined);                     // then all ranks begin their automatic names anew

  void fail(const EpochCause&);                            // the epoch has ended
  std::string failure() const;                             // why; "" while it lasts
  bool close();                                            // this rank shuts down. False: it was closed before

 private:
  const int rank_;
  mutable std::mutex mutex_;
  std::vector<RequestPtr> requests_;
  std::vector<Refusal> refusals_;
  Names names_;                                            // "group/key"
  std::map<std::pair<int, Kind>, uint64_t> numbers_;       // the next automatic one
  std::optional<EpochCause> failure_;
  bool closed_ = false;
  bool joining_ = false;                                   // nothing is submitted until join() returns
  std::atomic<bool> full_{false};
  std::atomic<bool> any_held_{false};                      // false: no request that is done holds its name
  std::atomic<int> in_flight_{0};
};

}  // namespace lightcc
