// Names that two threads of a member used at the same time, so that nobody knows which calls of the members belong
// together. A name is withdrawn: what was announced by it fails everywhere, and members refuse it. Each member answers
// when it has heard; what it has announced until then is of before, fails there, and is dropped here.
#include <algorithm>

#include "engine/negotiate/control/coordinator.h"

namespace lightcc {

std::string why_withdrawn(int rank) {
  return "two threads of rank " + std::to_string(rank) +
         " used this name at the same time, so ranks may pair different calls, and may have done so before: give each "
         "thread names of its own. All ranks refuse this name until the next barrier() of its process set "
         "(docs/errors.md)";
}

void Coordinator::contended(int member, const std::string& key) {
  if (auto it = unheard_.find(key); it != unheard_.end() && it->second[size_t(member)] > 0) return;  // said before
  Entry& e = entry(key);
  end_plan_of(e);
  if (e.ready) {
    std::erase(ready_, &e);
    ready_bytes_ -= bytes_of(e.announcement());
  }
  reset(e);
  e.owed.clear();
  std::vector<int>& unheard = unheard_[key];
  unheard.resize(rank_of_.size());
  for (int& count : unheard) ++count;
  withdrawals_.push_back({key, why_withdrawn(rank_of_[size_t(member)])});
}

void Coordinator::name_given_up(int member, const std::string& key) {
  auto it = unheard_.find(key);
  if (it == unheard_.end() || it->second[size_t(member)] == 0)
    throw Error(Code::internal, "a member gave up a name that was not withdrawn");
  --it->second[size_t(member)];
  if (std::ranges::all_of(it->second, [](int count) { return count == 0; })) unheard_.erase(it);
}

bool Coordinator::is_withdrawn(const Entry& e, int member) const {
  auto it = unheard_.find(e.key);
  return it != unheard_.end() && it->second[size_t(member)] > 0;
}

}  // namespace lightcc
