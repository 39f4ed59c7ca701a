// How many cores this process may keep busy: spinning pays only if every waiting thread has its own.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace lightcc {

// The cores it is bound to, or fewer if a cgroup's CPU quota (version 1 or 2, of any enclosing group)
// allows less: rounded up, at least 1. `root` stands before /proc and /sys.
int usable_cores(const std::string& root = "");

std::vector<int32_t> bound_to();                // core numbers, by sched_setaffinity: mpirun binds, taskset too

// One bit for each core: a few bytes where a list of numbers would be thousands.
using CoreBitmap = std::vector<uint64_t>;
CoreBitmap bitmap_of(const std::vector<int32_t>& cores);
CoreBitmap together(CoreBitmap, const CoreBitmap&);  // the cores of either
int count_of(const CoreBitmap&);

int bound_cores();                              // how many
int quota_cores(const std::string& root = "");  // by cgroup; 0: no quota
int within_quota(int cores, const std::string& root = "");

}  // namespace lightcc
