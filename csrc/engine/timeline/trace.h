// The timeline: what an engine did and when, for chrome://tracing and Perfetto (docs/timeline.md). One row a tensor; in
// it one phase after the other; in a phase one activity after the other, and ticks. Here it is seen to that slices nest
// and that times do not go back. Callers give the time. Any thread may call.
#pragma once
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/json.h"
#include "engine/timeline/trace_file.h"

namespace lightcc {

// The file of one rank: `{rank}` in the pattern stands for its number; without it only rank 0 writes. "": not this one.
std::string timeline_path(std::string pattern, int rank);

class Timeline {
 public:
  struct Start {
    std::string path, writer;  // "rank 0 of 2 on host h"
    bool mark_cycles = false;  // whether mark() does anything
    uint64_t now_ns = 0;       // when the file's time begins, and when that is in microseconds since 1970
    int64_t wall_us = 0;
    bool by_bucket = false;    // bucket_rows.h; else each row is a process to the viewers, as Horovod's are
  };
  explicit Timeline(size_t most_events = 1 << 16) : most_events_(most_events) {}  // that wait to be written
  ~Timeline() { stop(0); }

  // Makes or empties the file, or throws Error{invalid_argument}. One that is being written is completed first.
  void start(const Start&);
  bool stop(uint64_t now_ns);  // completes the file and closes it; false: none was being written
  bool running() const { return running_.load(std::memory_order_relaxed); }
  bool by_bucket() const { return by_bucket_.load(std::memory_order_relaxed); }
  uint32_t file_number() const { return file_number_.load(std::memory_order_relaxed); }  // of how many; grows

  // Events, ignored unless a file is being written.

  // Ends the row's phase and begins this one, unless that is the present one.
  void phase(const std::string& row, std::string_view name, uint64_t time_ns, const JsonObject& args = {});
  // The same inside the phase; ignored where there is none. "": ends only.
  void activity(const std::string& row, std::string_view name, uint64_t time_ns);
  // A moment of that phase, which begins with it if the row is in none. In another, it waits for that one's end.
  void tick(const std::string& row, std::string_view phase, std::string_view name, uint64_t time_ns);
  // Ends the row's phase. last: the row is not mentioned again.
  void end(const std::string& row, uint64_t time_ns, const JsonObject& args = {}, bool last = false);
  void mark(std::string_view name, uint64_t time_ns, const JsonObject& args = {});  // a moment of all rows
  void count(std::string_view name, uint64_t time_ns, const JsonObject& values);      // a counter of these series

 private:
  struct Slice {
    std::string name;
    bool written = false;
  };  // name "": none is open
  struct Track {
    uint32_t id = 0;
    bool named = false;  // in the file
    uint64_t last_ns = 0;
    Slice phase, activity;
    std::vector<std::pair<std::string, std::string>> waiting;  // ticks: phase, name
  };
  bool complete(uint64_t now_ns);  // under life_

  // All under the mutex.
  Track* at(const std::string& row, uint64_t time_ns);  // nullptr: no file
  bool put(const std::string& name, Track&, char kind, std::string_view what, const JsonObject& args = {});
  void begin(const std::string& name, Track&, Slice&, std::string_view what, const JsonObject& args = {});
  void end(const std::string& name, Track&, Slice&, const JsonObject& args = {});
  void end_phase(const std::string& name, Track&, const JsonObject& args = {});

  const size_t most_events_;
  std::atomic<bool> running_{false}, by_bucket_{false};
  std::atomic<uint32_t> file_number_{0};
  std::mutex life_;  // held through start and stop, which take turns
  std::mutex mutex_;
  std::unique_ptr<TraceFile> file_;
  std::unordered_map<std::string, Track> rows_;
  uint32_t last_id_ = 0;
  uint64_t start_ns_ = 0, mark_ns_ = 0, last_ns_ = 0;  // of the start, the last mark or count, the last event
  bool mark_cycles_ = false;
};

}  // namespace lightcc
