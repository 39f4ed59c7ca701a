#include "base/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <mutex>

namespace lightcc {
namespace {

constexpr const char* kNames[] = {"TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL"};

std::atomic<int> lowest{static_cast<int>(Level::warning)};
std::mutex guard;  // of the two below, which change when init learns the rank
bool with_time = true;
std::string who;   // " rank 1 host h"

std::string clock_text(std::chrono::system_clock::time_point time) {
  const auto since = time.time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(since).count() % 1000;
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm local{};
  localtime_r(&seconds, &local);
  char text[40];
  std::snprintf(text, sizeof text, " %02d:%02d:%02d.%03d", local.tm_hour, local.tm_min, local.tm_sec,
                static_cast<int>(ms));
  return text;
}

}  // namespace

void set_log(int level, bool hide_time, int rank, const std::string& host) {
  std::lock_guard lock(guard);
  with_time = !hide_time;
  who = " rank " + std::to_string(rank) + " host " + host;
  lowest = level;
}

std::string log_line(Level level, const std::string& text, std::chrono::system_clock::time_point time) {
  const char* name = kNames[static_cast<int>(level)];
  std::lock_guard lock(guard);
  return std::string("[lightcc ") + name + who + (with_time ? clock_text(time) : "") + "] " + text + "\n";
}

void log(Level level, const std::string& text) {
  if (static_cast<int>(level) < lowest.load(std::memory_order_relaxed)) return;
  const std::string line = log_line(level, text, std::chrono::system_clock::now());
  // One write, so that the kernel keeps the line whole; a log that cannot be written is nobody's error.
  while (::write(STDERR_FILENO, line.data(), line.size()) < 0 && errno == EINTR) {
  }
}

}  // namespace lightcc
