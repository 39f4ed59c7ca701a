// The way that a group's negotiation takes between the members and their coordinator (member 0). The members of a host
// hang below its first, the host's leader; leaders hang below each other, hosts in order of their first member. So a
// host's ranks speak to the others with one voice, and nobody has more than a few neighbours on other hosts. Pure: all
// members work out the same tree.
#pragma once
#include <vector>

#include "net/group.h"

namespace lightcc {

// One member's view of it. Members are indices in the group.
struct Tree {
  static constexpr int kFanOut = 8;  // hosts below a host

  std::vector<int> ancestors;           // parent, its parent, ... member 0; empty there
  std::vector<int> children;            // first those of this host
  std::vector<std::vector<int>> below;  // by child: it, then all that are below it. Its own subtree, in the same order
  std::vector<int> subtree;             // this member, then `below` of each child in turn

  Tree() = default;
  // As this rank sees it, which must be a member.
  explicit Tree(const Group& group) {
    const auto& hosts = group.hosts();
    const int member = group.index();
    size_t host = size_t(group.host_of(member));
    if (hosts[host][0] != member) {
      ancestors.push_back(hosts[host][0]);
    } else {
      for (size_t i = 1; i < hosts[host].size(); ++i)
        children.push_back(hosts[host][i]), below.push_back({children.back()});
      for (size_t i = host * kFanOut + 1; i <= host * kFanOut + kFanOut && i < hosts.size(); ++i) {
        children.push_back(hosts[i][0]);
        add_host(hosts, i, below.emplace_back());
      }
    }
    for (; host > 0; host = (host - 1) / kFanOut) ancestors.push_back(hosts[(host - 1) / kFanOut][0]);
    subtree.push_back(member);
    for (auto& members : below) subtree.insert(subtree.end(), members.begin(), members.end());
    child_of_.assign(size_t(group.size()), -1);
    for (size_t i = 0; i < below.size(); ++i)
      for (int one : below[i]) child_of_[size_t(one)] = int(i);
  }

  bool is_root() const { return ancestors.empty(); }
  int parent() const { return ancestors.empty() ? -1 : ancestors[0]; }
  // Index of the child that the member is or is below of; -1: none.
  int toward(int member) const {
    return member < 0 || member >= int(child_of_.size()) ? -1 : child_of_[size_t(member)];
  }

 private:
  static void add_host(const std::vector<std::vector<int>>& hosts, size_t host, std::vector<int>& to) {
    to.insert(to.end(), hosts[host].begin(), hosts[host].end());
    for (size_t i = host * kFanOut + 1; i <= host * kFanOut + kFanOut && i < hosts.size(); ++i) add_host(hosts, i, to);
  }
  std::vector<int> child_of_;  // by member
};

}  // namespace lightcc
