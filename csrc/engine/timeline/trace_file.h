// A file of trace events in Chrome's array format, which is readable also without its end. Events go by way of a
// bounded queue to a thread that writes them every tenth of a second, so that reporting one never waits for a disk; a
// process that is killed loses what came after the last write. Any thread may call.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"

namespace lightcc {

struct TraceEvent {
  char kind;  // begin 'B', end 'E', moment in a row 'X', moment of all rows 'i', counter 'C', name of a row 'M'
  uint32_t row;
  uint64_t time_ns;  // not before the file's origin
  std::string name;
  std::string args;  // a JSON object, or nothing
};

class TraceFile {
 public:
  // Makes or empties the file, or throws Error{invalid_argument}. about: a JSON object that says whose file it is;
  // origin_ns: the time that is written as 0; most_events: how many may wait to be written.
  // one_process: rows are threads of one process to the viewers, else each is a process of its own.
  TraceFile(const std::string& path, const std::string& about, uint64_t origin_ns, size_t most_events,
            bool one_process = false);
  ~TraceFile();  // when all is written

  // False: the queue is full, and the event is left out and counted; or nothing can be written any more. A 'B' that was
  // taken has room for its 'E'.
  bool put(TraceEvent);
  void close(uint64_t now_ns);  // adds the last event: how many were left out
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

 private:
  void run();  // the thread
  void print(const TraceEvent&, std::string& text) const;
  bool write(const std::string& text);

  const std::string path_;
  const uint64_t origin_ns_;
  const size_t most_events_;
  const bool one_process_;
  Fd fd_;
  std::atomic<bool> failed_{false};

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<TraceEvent> events_;
  size_t owed_ = 0;  // ends of slices whose beginning was taken
  uint64_t dropped_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace lightcc
