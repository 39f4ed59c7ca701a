// Which ranks share a host: plain data, the same on all ranks.
#pragma once
#include <string>
#include <vector>

namespace lightcc {

struct Topology {
  std::vector<std::vector<int>> hosts;  // world ranks of each host, ascending; hosts by their first rank
  std::vector<int> host_of;             // by world rank: index in hosts
  std::vector<int> local;               // by world rank: index in its host

  // leader[r]: the first rank of r's host. Throws Error{internal} if that is contradictory.
  static Topology by_leader(const std::vector<int>& leader);
  static Topology one_host(int ranks);
  int ranks() const { return int(host_of.size()); }
  bool share_host(int a, int b) const { return host_of[size_t(a)] == host_of[size_t(b)]; }
  int leader(int rank) const { return hosts[size_t(host_of[size_t(rank)])][0]; }
  bool is_homogeneous() const;          // all hosts have equally many ranks
  std::string text() const;             // "2 hosts: ranks 0, 1 | 2, 3"
};

}  // namespace lightcc
