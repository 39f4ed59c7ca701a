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
  explicit StatsPage(const std::string& directory);
  ~StatsPage();  // removes the file
  StatsRow* take(int engine, const std::string& peer);  // nullptr: all are used
  void give_back(StatsRow*);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  StatsLayout* layout_ = nullptr;
};

// Where pages of this user may be, in this order: anybody can take the first one's name, which is below /tmp.
std::vector<std::string> stats_directories();
// In the first that can be used; none, and a warning that says why, where none can.
std::unique_ptr<StatsPage> make_stats_page(const std::vector<std::string>& directories = stats_directories());

// The reader's.
struct StatsOfConnection {
  uint64_t pid, engine;
  std::string peer;
  std::array<uint64_t, kCounters> counters;
};
// Paths, of pages in directories that are this user's own.
std::vector<std::string> stats_pages(const std::vector<std::string>& directories = stats_directories());
std::optional<std::vector<StatsOfConnection>> read_stats(const std::string& path);  // nothing: no page of this version

}  // namespace harp
