#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <sstream>
#include <vector>

namespace lightcc {
namespace {

// A file that is missing or says something else is no quota: kernels and containers differ in what they show.
double number_in(const std::string& path) {
  std::ifstream file(path);
  double number = 0;
  return file >> number ? number : 0;
}

double quota_v2(const std::string& folder) {  // cpu.max: "150000 100000", or "max 100000"
  std::ifstream file(folder + "/cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && period > 0 ? quota / period : 0;
}

double quota_v1(const std::string& folder) {  // a quota of -1 is none
  const double period = number_in(folder + "/cpu.cfs_period_us");
  return period > 0 ? std::max(0.0, number_in(folder + "/cpu.cfs_quota_us") / period) : 0;
}

// The smallest quota of the group and of all groups around it. Inside a container the path may be the host's
// and not exist here; walking up ends at the mount, which is then the container's own group.
double smallest(double (*quota)(const std::string&), const std::string& mount, std::string path) {
  double least = 0;
  if (path.find("..") != std::string::npos) path.clear();  // a group outside the mount
  while (true) {
    const double here = quota(mount + path);
    if (here > 0) least = least > 0 ? std::min(least, here) : here;
    const size_t slash = path.find_last_of('/');
    if (slash == std::string::npos) return least;
    path.resize(slash);
  }
}

bool lists_cpu(const std::string& controllers) { return ("," + controllers + ",").find(",cpu,") != std::string::npos; }

}  // namespace

std::vector<int32_t> bound_to() {
  std::vector<int32_t> cores;
  for (size_t sets = 1; sets <= 64; sets *= 2) {  // the kernel refuses a mask smaller than its own
    std::vector<cpu_set_t> mask(sets);
    const size_t bytes = sets * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) == 0) {
      for (size_t core = 0; core < bytes * 8; ++core)
        if (CPU_ISSET_S(core, bytes, mask.data())) cores.push_back(int32_t(core));
      break;
    }
    if (errno != EINVAL) break;
  }
  return cores;
}

CoreBitmap bitmap_of(const std::vector<int32_t>& cores) {
  CoreBitmap bits;
  for (int32_t core : cores) {
    bits.resize(std::max(bits.size(), size_t(core) / 64 + 1));
    bits[size_t(core) / 64] |= uint64_t(1) << core % 64;
  }
  return bits;
}

CoreBitmap together(CoreBitmap a, const CoreBitmap& b) {
  a.resize(std::max(a.size(), b.size()));
  for (size_t i = 0; i < b.size(); ++i) a[i] |= b[i];
  return a;
}

int count_of(const CoreBitmap& bits) {
  int count = 0;
  for (uint64_t word : bits) count += std::popcount(word);
  return count;
}

int bound_cores() { return std::max(1, int(bound_to().size())); }

int quota_cores(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::ifstream groups(root + "/proc/self/cgroup");
  double least = 0;
  for (std::string line; std::getline(groups, line);) {  // "0::/path" (v2), "4:cpu,cpuacct:/path" (v1)
    std::istringstream fields(line);
    std::string id, controllers, path;
    std::getline(fields, id, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    double here = 0;
    if (id == "0" && controllers.empty()) here = smallest(quota_v2, mount, path);
    else if (lists_cpu(controllers)) here = smallest(quota_v1, mount + "/" + controllers, path);
    if (here > 0) least = least > 0 ? std::min(least, here) : here;
  }
  return static_cast<int>(std::ceil(least));
}

int within_quota(int cores, const std::string& root) {
  const int quota = quota_cores(root);
  return std::max(1, quota > 0 ? std::min(cores, quota) : cores);
}

int usable_cores(const std::string& root) { return within_quota(bound_cores(), root); }

}  // namespace lightcc
