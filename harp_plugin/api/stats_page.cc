#include "harp_plugin/api/stats_page.h"

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/fd.h"
#include "base/log.h"

namespace harp {

namespace {

using lightcc::Code;
using lightcc::Error;
using lightcc::Fd;
using lightcc::system_error;

std::atomic<uint32_t> next_page{0};

// The process of a page's name, "PID-N"; 0: this is no such name.
pid_t process_of(const char* name) {
  pid_t pid = 0;
  uint32_t number = 0;
  const char* end = name + std::strlen(name);
  const auto first = std::from_chars(name, end, pid);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '-') return 0;
  const auto second = std::from_chars(first.ptr + 1, end, number);
  return second.ec == std::errc() && second.ptr == end && pid > 0 ? pid : 0;
}

bool is_gone(pid_t pid) { return kill(pid, 0) != 0 && errno == ESRCH; }

bool is_own(const std::string& directory) {
  struct stat status;
  return lstat(directory.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == geteuid() &&
         (status.st_mode & 022) == 0;
}

void make_own(const std::string& directory) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) throw system_error("creating " + directory);
  if (!is_own(directory))
    throw Error(Code::invalid_argument, directory + " is not a directory that only this user can write to");
}

template <class F>
void for_each_page(const std::string& directory, F&& use) {
  DIR* entries = opendir(directory.c_str());
  if (!entries) return;
  while (const dirent* entry = readdir(entries))
    if (const pid_t pid = process_of(entry->d_name)) use(directory + "/" + entry->d_name, pid);
  closedir(entries);
}

}  // namespace

const std::array<const char*, kCounters> kCounterNames = {
    "packets_sent", "packets_received", "bytes_sent", "bytes_received", "messages_sent", "messages_received",
    "retransmitted", "lost", "spurious", "timeouts", "duplicates", "malformed", "unauthenticated", "out_of_window",
    "out_of_buffer", "acks_sent", "acks_received", "placed", "window_packets", "srtt_ns", "least_rtt_ns"};

std::vector<std::string> stats_directories() {
  const std::string user = std::to_string(geteuid());
  return {"/tmp/harp-" + user, geteuid() == 0 ? "/run/harp" : "/run/user/" + user + "/harp"};
}

std::unique_ptr<StatsPage> make_stats_page(const std::vector<std::string>& directories) {
  std::string reasons;
  for (const std::string& directory : directories) {
    try {
      return std::make_unique<StatsPage>(directory);
    } catch (const Error& error) {
      reasons += (reasons.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  lightcc::log(lightcc::Level::warning, "HARP: harp-stat will not see this process: " + reasons +
                                            " (HARP_STATS=0 asks for no page)");
  return nullptr;
}

StatsPage::StatsPage(const std::string& directory) {
  make_own(directory);
  for_each_page(directory, [](const std::string& path, pid_t pid) {
    if (is_gone(pid)) unlink(path.c_str());
  });
  path_ = directory + "/" + std::to_string(getpid()) + "-" + std::to_string(next_page.fetch_add(1));
  unlink(path_.c_str());  // of a process that had this number before
  Fd file(open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) throw system_error("creating " + path_);
  void* memory = MAP_FAILED;
  // Space is reserved now: a store into a page that a full file system cannot give would end the process.
  const int error = posix_fallocate(file.get(), 0, sizeof(StatsLayout));
  if (error == 0)
    memory = mmap(nullptr, sizeof(StatsLayout), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  else
    errno = error;
  if (memory == MAP_FAILED) {
    const Error why = system_error("mapping " + path_);
    unlink(path_.c_str());
    throw why;
  }
  layout_ = static_cast<StatsLayout*>(memory);
  layout_->pid.store(static_cast<uint64_t>(getpid()), std::memory_order_relaxed);
  layout_->rows.store(kStatsRows, std::memory_order_relaxed);
  layout_->magic.store(kStatsMagic, std::memory_order_release);
}

StatsPage::~StatsPage() {
  unlink(path_.c_str());
  munmap(layout_, sizeof(StatsLayout));
}

StatsRow* StatsPage::take(int engine, const std::string& peer) {
  for (StatsRow& row : layout_->row) {
    uint64_t free = 0;
    if (row.used.load(std::memory_order_relaxed) != 0 || !row.used.compare_exchange_strong(free, 1)) continue;
    row.engine.store(static_cast<uint64_t>(engine), std::memory_order_relaxed);
    std::array<uint64_t, std::tuple_size_v<decltype(row.peer)>> text{};
    std::memcpy(text.data(), peer.data(), std::min(peer.size(), sizeof text - 1));
    for (size_t i = 0; i < text.size(); ++i) row.peer[i].store(text[i], std::memory_order_relaxed);
    for (auto& counter : row.counters) counter.store(0, std::memory_order_relaxed);
    return &row;
  }
  return nullptr;
}

void StatsPage::give_back(StatsRow* row) { row->used.store(0, std::memory_order_release); }

std::vector<std::string> stats_pages(const std::vector<std::string>& directories) {
  std::vector<std::string> paths;
  for (const std::string& directory : directories) {
    if (!is_own(directory)) continue;
    for_each_page(directory, [&](const std::string& path, pid_t pid) {
      if (!is_gone(pid)) paths.push_back(path);
    });
  }
  return paths;
}

std::optional<std::vector<StatsOfConnection>> read_stats(const std::string& path) {
  Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat status;
  if (!file || fstat(file.get(), &status) != 0 || status.st_size != sizeof(StatsLayout)) return {};
  void* memory = mmap(nullptr, sizeof(StatsLayout), PROT_READ, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) return {};
  const auto* layout = static_cast<const StatsLayout*>(memory);
  std::optional<std::vector<StatsOfConnection>> all;
  if (layout->magic.load(std::memory_order_acquire) == kStatsMagic && layout->rows == kStatsRows) {
    all.emplace();
    for (const StatsRow& row : layout->row) {
      if (row.used.load(std::memory_order_acquire) == 0) continue;
      StatsOfConnection& one = all->emplace_back();
      one.pid = layout->pid;
      one.engine = row.engine;
      std::array<uint64_t, std::tuple_size_v<decltype(row.peer)> + 1> text{};
      for (size_t i = 0; i < row.peer.size(); ++i) text[i] = row.peer[i].load(std::memory_order_relaxed);
      one.peer = reinterpret_cast<const char*>(text.data());
      for (size_t i = 0; i < kCounters; ++i) one.counters[i] = row.counters[i].load(std::memory_order_relaxed);
    }
  }
  munmap(memory, sizeof(StatsLayout));
  return all;
}

}  // namespace harp
