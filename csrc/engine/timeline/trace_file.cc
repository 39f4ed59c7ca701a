#include "engine/timeline/trace_file.h"

#include <fcntl.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"

namespace lightcc {
namespace {

constexpr auto kWriteEvery = std::chrono::milliseconds(100);

}  // namespace

TraceFile::TraceFile(const std::string& path, const std::string& about, uint64_t origin_ns, size_t most_events,
                     bool one_process)
    : path_(path),
      origin_ns_(origin_ns),
      most_events_(most_events),
      one_process_(one_process),
      // Without O_NONBLOCK a pipe that nobody reads would be waited for, here and in every write.
      fd_(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666)) {
  if (!fd_ || !write("[\n"
                     R"({"name":"process_name","ph":"M","pid":0,"tid":0,"args":)" +
                     about + "}"))
    throw Error(Code::invalid_argument, "cannot write '" + path + "': " + std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

TraceFile::~TraceFile() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_one();
  thread_.join();  // it waits for the file system only
}

bool TraceFile::put(TraceEvent event) {
  std::lock_guard lock(mutex_);
  if (event.kind == 'E') {
    --owed_;
  } else {
    const bool begins = event.kind == 'B';
    if (failed() || events_.size() + owed_ + (begins ? 2 : 1) > most_events_) {
      dropped_ += event.kind == 'M' ? 0 : begins ? 2 : 1;  // a row's name will be tried again
      return false;
    }
    owed_ += begins;
  }
  events_.push_back(std::move(event));
  if (events_.size() == most_events_ / 2) wake_.notify_one();
  return true;
}

void TraceFile::close(uint64_t now_ns) {
  std::lock_guard lock(mutex_);
  events_.push_back({'i', 0, now_ns, "TIMELINE_END", JsonObject().add("dropped_events", int64_t(dropped_)).text()});
  if (dropped_ && !failed())
    log(Level::warning, "the timeline '" + path_ + "' lacks " + std::to_string(dropped_) +
                            " events that came faster than they could be written");
}

void TraceFile::run() {
  prctl(PR_SET_NAME, "lightcc-trace");
  sigset_t broken_pipe;  // a pipe whose reader has gone is an error as others are
  sigemptyset(&broken_pipe);
  sigaddset(&broken_pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &broken_pipe, nullptr);
  std::vector<TraceEvent> events;
  std::string text;
  for (bool last = false; !last;) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kWriteEvery, [&] { return closing_ || events_.size() >= most_events_ / 2; });
      events.swap(events_);
      last = closing_;
    }
    for (const TraceEvent& event : events) print(event, text);
    events.clear();
    if (last) text += "\n]\n";
    if (!text.empty() && !failed() && !write(text)) {
      failed_ = true;
      log(Level::error, "cannot go on writing the timeline '" + path_ + "': " + std::strerror(errno) +
                            "; training goes on without it");
    }
    text.clear();
  }
}

bool TraceFile::write(const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(fd_.get(), text.data() + done, text.size() - done);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) done += size_t(n);
  }
  return true;
}

// Each event on a line of its own after a comma, so that the file never lacks more than the end of its array.
void TraceFile::print(const TraceEvent& e, std::string& text) const {
  const std::string row = std::to_string(e.row);
  const std::string process = one_process_ ? "0" : row, kind = one_process_ ? "thread" : "process";
  if (e.kind == 'M') {
    const std::string about = R"(","ph":"M","pid":)" + process + R"(,"tid":)" + row + R"(,"args":{")";
    text += ",\n{\"name\":\"" + kind + "_name" + about + "name\":" + json_string(e.name) + "}}";
    text += ",\n{\"name\":\"" + kind + "_sort_index" + about + "sort_index\":" + row + "}}";
    return;
  }
  char head[96];
  const uint64_t since = e.time_ns - origin_ns_;
  std::snprintf(head, sizeof head, R"({"ph":"%c","ts":%llu.%03u,"pid":%s,"tid":%u,)", e.kind,
                static_cast<unsigned long long>(since / 1000), unsigned(since % 1000), process.c_str(), e.row);
  text.append(",\n").append(head);
  if (e.kind == 'X') text += "\"dur\":0,";
  if (e.kind == 'i') text += "\"s\":\"g\",";
  text += "\"name\":" + json_string(e.name);
  if (!e.args.empty()) text += ",\"args\":" + e.args;
  text += "}";
}

}  // namespace lightcc
