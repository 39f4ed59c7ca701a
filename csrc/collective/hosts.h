// Which ranks share a host, as algorithms know it.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

namespace lightcc {

using Hosts = std::vector<std::vector<int>>;  // the members of each host; each member of the group once

inline Hosts one_host(int members) {
  Hosts hosts(1);
  for (int member = 0; member < members; ++member) hosts[0].push_back(member);
  return hosts;
}

// Whether all hosts have equally many members, more than one, and there are several.
inline bool are_even(const Hosts& hosts) {
  const auto has_as_many = [&](const auto& host) { return host.size() == hosts[0].size(); };
  return hosts.size() > 1 && hosts[0].size() > 1 && std::ranges::all_of(hosts, has_as_many);
}

// All members, those of a host side by side: what goes from each to the next leaves a host once.
inline std::vector<int> in_host_order(const Hosts& hosts) {
  std::vector<int> members;
  for (const auto& host : hosts) members.insert(members.end(), host.begin(), host.end());
  return members;
}

}  // namespace lightcc
