// What a set of hosts is called in files that are kept for later runs (base/cache_file.h).
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "base/config.h"
#include "net/peers.h"

namespace lightcc {

// The interfaces that are used, what carries links, and of each host its name and how many ranks it has: the same in
// each job there.
inline std::string hosts_subject(const Peers& peers, const Config& config) {
  std::string text = "interfaces " + config.iface;
  const std::string over = config.net_plugin.empty() ? config.net : "plugin " + config.net_plugin;
  if (over != Config{}.net) text += "; over " + over;
  for (const std::vector<int>& ranks : peers.topology().hosts) {
    const std::string& name = peers.name(ranks[0]);  // "rank 1 (pid 17) on host h"
    text += "; " + std::to_string(ranks.size()) + name.substr(std::min(name.find(" on host "), name.size()));
  }
  return text;
}

}  // namespace lightcc
