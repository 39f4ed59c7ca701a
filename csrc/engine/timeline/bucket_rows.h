// The timeline by buckets: a row of steps, and as many rows as batches are on their way at once, whatever the number of
// tensors; beside them a counter of bytes. Invariants:
// 1. A batch takes the first row that was free when its first request was submitted, and has it until its last is done.
// 2. In its row there is NEGOTIATE_<KIND>, from that submission on, with a tick for each rank that was ready with all
//    of the batch, then <KIND>, and in that what was done to bring it about.
// Only whoever holds the progress lock calls. Callers give the time; requests are known by their rows of the other
// layout ("allreduce.w").
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "engine/timeline/trace.h"

namespace lightcc {

class BucketRows {
 public:
  explicit BucketRows(Timeline& timeline) : timeline_(timeline) {}

  void step(uint64_t now_ns);  // a step of training begins
  void submitted(const std::string& request, int64_t bytes, uint64_t now_ns);
  void ready(const std::string& request, int rank, uint64_t now_ns);
  // These run as one; waits: once another batch has.
  void agreed(const std::vector<std::string>& requests, const std::string& kind, JsonObject args, bool waits,
              uint64_t now_ns);
  void activity(const std::string& request, std::string_view what, uint64_t now_ns);
  void finished(const std::string& request, bool failed, const JsonObject& status, uint64_t now_ns);

 private:
  struct Pending {             // submitted here and not done
    int64_t bytes = 0;
    uint64_t submitted_ns = 0;
    int row = -1;              // once its batch is agreed on
  };
  struct BucketRow {
    int unfinished = 0;        // requests of the batch that has it
    uint64_t free_ns = 0;      // since when
  };
  void begin_if_new();
  int take_row(uint64_t since_ns, int requests);
  void count_bytes(uint64_t now_ns);

  Timeline& timeline_;
  uint32_t file_ = 0;          // of the timeline, that all of this is in
  int64_t steps_ = 0, in_flight_ = 0, waiting_ = 0;
  std::unordered_map<std::string, Pending> pending_;
  std::unordered_map<std::string, std::vector<std::pair<int, uint64_t>>> ready_;  // ranks, and since when
  std::vector<BucketRow> rows_;
};

}  // namespace lightcc
