#include "net/topology.h"

#include "base/error.h"
#include "base/types.h"

namespace lightcc {

Topology Topology::by_leader(const std::vector<int>& leader) {
  Topology t;
  t.host_of.resize(leader.size());
  t.local.resize(leader.size());
  for (int rank = 0; rank < int(leader.size()); ++rank) {
    const int first = leader[size_t(rank)];
    if (first < 0 || first > rank || leader[size_t(first)] != first)
      throw Error(Code::internal, "init: rank " + std::to_string(rank) + " says that it shares a host with rank " +
                                      std::to_string(first) + ", which does not lead its host");
    if (first == rank) {
      t.host_of[size_t(rank)] = int(t.hosts.size());
      t.hosts.emplace_back();
    }
    const int host = t.host_of[size_t(rank)] = t.host_of[size_t(first)];
    t.local[size_t(rank)] = int(t.hosts[size_t(host)].size());
    t.hosts[size_t(host)].push_back(rank);
  }
  return t;
}

Topology Topology::one_host(int ranks) { return by_leader(std::vector<int>(size_t(ranks), 0)); }

std::string Topology::text() const {
  std::string text = std::to_string(hosts.size()) + (hosts.size() == 1 ? " host" : " hosts") + ": ranks ";
  for (size_t i = 0; i < hosts.size(); ++i) text += (i ? " | " : "") + text_of(hosts[i]);
  return text;
}

bool Topology::is_homogeneous() const {
  for (auto& host : hosts)
    if (host.size() != hosts[0].size()) return false;
  return true;
}

}  // namespace lightcc
