#include "net/group.h"

#include <unordered_map>
#include <utility>

namespace lightcc {

Group::Group(int id, std::vector<int> ranks, int own_rank, const Topology& topology)
    : id_(id), ranks_(std::move(ranks)), index_of_(size_t(topology.ranks()), -1) {
  std::unordered_map<int, int> seen;  // by host of the world: index in hosts_
  for (int member = 0; member < size(); ++member) {
    const size_t rank = size_t(ranks_[size_t(member)]);
    index_of_[rank] = member;
    const auto [host, is_new] = seen.try_emplace(topology.host_of[rank], int(hosts_.size()));
    if (is_new) hosts_.emplace_back();
    hosts_[size_t(host->second)].push_back(member);
    host_of_.push_back(host->second);
    local_.push_back(topology.local[rank]);
  }
  index_ = index_of(own_rank);
}

}  // namespace lightcc
