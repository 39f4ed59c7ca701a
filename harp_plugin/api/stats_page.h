// Counters of a process's connections in a file that others read while it runs: /tmp/harp-UID/PID-N, one for each
// context. Engines write their rows (relaxed stores, ten times a second); a reader may see numbers of two moments.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "harp_plugin/core/connection.h"

namespace harp {

inline constexpr size_t kCounters = sizeof(Counters) / sizeof(uint64_t);
extern const std::array<const char*, kCounters> kCounterNames;  // in the order of Counters

inline constexpr uint64_t kStatsMagic = 0x3130535052414801;  // of this layout
inline constexpr size_t kStatsRows = 1024;                    // connections beyond them are not shown

struct StatsRow {
  std::atomic<uint64_t> used;    // 0: free
  std::atomic<uint64_t> engine;
  std::array<std::atomic<uint64_t>, 8> peer;  // text, ended by zeros
  std::array<std::atomic<uint64_t>, kCounters> counters;
};
struct StatsLayout {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> pid;
  std::atomic<uint64_t> rows;  // kStatsRows
  std::array<StatsRow, kStatsRows> row;
};

// The writer's side. Any thread; a row is one connection's.
class StatsPage {
 public:
  // Removes pages of processes that are gone. Throws where the directory cannot be used: it must be this user's own.
  explicit StatsPage(const std::string& directory = stats_directory());
  ~StatsPage();  // removes the file
  StatsRow* take(int engine, const std::string& peer);  // nullptr: all are used
  void give_back(StatsRow*);
  const std::string& path() const { return path_; }

  static std::string stats_directory();

 private:
  std::string path_;
  StatsLayout* layout_ = nullptr;
};

// The reader's.
struct StatsOfConnection {
  uint64_t pid, engine;
  std::string peer;
  std::array<uint64_t, kCounters> counters;
};
std::vector<std::string> stats_pages(const std::string& directory = StatsPage::stats_directory());  // paths
std::optional<std::vector<StatsOfConnection>> read_stats(const std::string& path);  // nothing: no page of this version

}  // namespace harp
