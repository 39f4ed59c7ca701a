// Members of a group that wait for each other in a cycle: each is blocked on a request that the next has not
// announced, and the next announces nothing until it has what it is itself blocked on. Pure.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace lightcc {

struct Wait {
  std::string key;
  std::vector<int> members;  // are blocked on it
  std::vector<int> missing;  // have not announced it
};

// The shortest cycle through the request `from`, which begins with it; empty: there is none. waits: by key, of
// requests that somebody is blocked on. A member that is late or computes is in no cycle, since it is blocked on none.
std::vector<Wait> find_cycle(const std::map<std::string, Wait>& waits, const std::string& from);

// waits: who waits in which operation for whom; where: " in process set 1", or "" for the world or several sets.
std::string deadlock_warning(const std::string& where, const std::string& waits);

}  // namespace lightcc
