// Where the system is short of something: which limit it is, and whether trying again may help.
#pragma once
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace lightcc {

// What an errno says, and where descriptors are short, which limit it is and how it is raised.
inline std::string reason_of(int error) {
  std::string reason = std::strerror(error);
  rlimit limit{};
  if (error == EMFILE && getrlimit(RLIMIT_NOFILE, &limit) == 0)
    reason += "; this process may have " + std::to_string(limit.rlim_cur) + ", raise the limit (ulimit -n)";
  if (error == ENFILE) reason += "; all processes of this host together have too many (sysctl fs.file-max)";
  return reason;
}

// So many, or as many as this process may give itself.
inline void allow_descriptors(rlim_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Whether a call failed for want of descriptors or memory, so that it may succeed later.
inline bool is_shortage(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace lightcc
