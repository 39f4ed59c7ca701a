// The process sets of an engine by their ids. All ranks add and remove them in the same order, so they give the same
// ids: the one that was freed first, or else the next. Any thread may call everything.
#pragma once
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "net/group.h"

namespace lightcc {

class GroupTable {
 public:
  std::shared_ptr<const Group> find(int id) const {  // nullptr: there is none
    std::lock_guard lock(mutex_);
    const auto it = groups_.find(id);
    return it == groups_.end() ? nullptr : it->second;
  }
  std::vector<int> ids() const {
    std::lock_guard lock(mutex_);
    std::vector<int> ids;
    for (const auto& [id, group] : groups_) ids.push_back(id);
    return ids;
  }
  // Also one that own_rank is no member of.
  std::shared_ptr<const Group> add(std::vector<int> ranks, int own_rank, const Topology& topology) {
    std::lock_guard lock(mutex_);
    int id = int(groups_.size());
    if (!free_.empty()) {
      id = free_.front();
      free_.pop_front();
    }
    return groups_[id] = std::make_shared<Group>(id, std::move(ranks), own_rank, topology);
  }
  void remove(int id) {
    std::lock_guard lock(mutex_);
    groups_.erase(id);
    free_.push_back(id);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<const Group>> groups_;
  std::deque<int> free_;
};

}  // namespace lightcc
