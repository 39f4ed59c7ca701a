#include "engine/negotiate/control/wait_cycle.h"

#include <algorithm>
#include <deque>

namespace lightcc {
namespace {

bool have_common(const std::vector<int>& a, const std::vector<int>& b) {
  return std::any_of(a.begin(), a.end(), [&](int one) { return std::find(b.begin(), b.end(), one) != b.end(); });
}

}  // namespace

std::string deadlock_warning(const std::string& where, const std::string& waits) {
  return "deadlock: ranks wait for each other, and none of them can go on" + where + ": " + waits +
         ". Is one of these calls inside a condition on the rank, or do ranks make them in another order? "
         "(docs/errors.md)";
}

std::vector<Wait> find_cycle(const std::map<std::string, Wait>& waits, const std::string& from) {
  std::map<std::string, std::string> before;  // a request that waits for one: how the search came there
  std::deque<std::string> next{from};
  for (; !next.empty() && waits.contains(next.front()); next.pop_front()) {
    const std::string key = next.front();
    for (const auto& [other, wait] : waits) {
      if (before.contains(other) || !have_common(waits.at(key).missing, wait.members)) continue;
      before[other] = key;
      next.push_back(other);
      if (other != from) continue;
      std::vector<Wait> cycle;
      std::string at = from;
      do cycle.insert(cycle.begin(), waits.at(at = before[at]));
      while (at != from);
      return cycle;
    }
  }
  return {};
}

}  // namespace lightcc
