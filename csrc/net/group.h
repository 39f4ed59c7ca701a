// A process set as one rank sees it: who its members are, and which of them share a host. A rank's number in the
// world is called `rank`, its place in a group `member`. Worked out once; then plain data that any thread may read.
#pragma once
#include <vector>

#include "net/topology.h"

namespace lightcc {

class Group {
 public:
  // ranks: of the members, in their order. own_rank: this rank, which need not be one of them.
  Group(int id, std::vector<int> ranks, int own_rank, const Topology&);

  int id() const { return id_; }                            // the world's is 0
  int size() const { return int(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }
  int rank(int member) const { return ranks_[size_t(member)]; }
  int index() const { return index_; }                      // this rank's place; -1: it is no member
  bool has_member(int member) const { return member >= 0 && member < size(); }

  int index_of(int rank) const { return rank >= 0 && rank < int(index_of_.size()) ? index_of_[size_t(rank)] : -1; }
  bool contains(int rank) const { return index_of(rank) >= 0; }

  // The members of each host; hosts in the order of their first members.
  const std::vector<std::vector<int>>& hosts() const { return hosts_; }
  int host_of(int member) const { return host_of_[size_t(member)]; }         // index in hosts()
  bool share_host(int a, int b) const { return host_of(a) == host_of(b); }
  bool on_one_host() const { return hosts_.size() == 1; }
  // A member's index among all ranks of its host, also of those that are not in the group.
  int local_index(int member) const { return local_[size_t(member)]; }
  const std::vector<int>& local_indices() const { return local_; }

 private:
  int id_, index_ = -1;
  std::vector<int> ranks_;
  std::vector<int> index_of_;                // by world rank
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, local_;         // by member
};

}  // namespace lightcc
