// What a set of hosts is called in files that are kept for later runs (base/cache_file.h).
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "net/peers.h"

namespace lightcc {

// "a:4,b:4", the hosts' names in their order and how many ranks each has, wherever the ranks' numbers are.
inline std::string hosts_subject(const Peers& peers) {
  constexpr std::string_view kOnHost = " on host ";
  std::vector<std::string> hosts;
  for (const std::vector<int>& ranks : peers.topology().hosts) {
    const std::string& name = peers.name(ranks[0]);
    const size_t at = name.find(kOnHost);
    const std::string host = at == name.npos ? name : name.substr(at + kOnHost.size());
    hosts.push_back(host + ":" + std::to_string(ranks.size()));
  }
  std::ranges::sort(hosts);
  std::string subject;
  for (const std::string& host : hosts) subject += (subject.empty() ? "" : ",") + host;
  return subject;
}

}  // namespace lightcc
