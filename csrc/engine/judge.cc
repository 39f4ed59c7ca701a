#include "engine/judge.h"

#include <utility>

namespace lightcc {

// Automatic names differ between process sets.
Judge::Operation Judge::operation(const Stuck& stuck) { return {stuck.kind, is_automatic(stuck.key) ? "" : stuck.key}; }

void Judge::hear(const Stuck& stuck) {
  withdraw(stuck.rank);
  if (stuck.group < 0) return;
  ranks_[stuck.rank].stuck = stuck;
  blocked_on_[operation(stuck)][stuck.group].insert(stuck.rank);
  accuse(stuck.rank);
}

void Judge::withdraw(int rank) {
  auto it = ranks_.find(rank);
  if (it == ranks_.end()) return;
  const Stuck& stuck = it->second.stuck;
  const int faced = it->second.faces;
  auto same = blocked_on_.find(operation(stuck));
  same->second[stuck.group].erase(rank);
  if (same->second[stuck.group].empty()) same->second.erase(stuck.group);
  if (same->second.empty()) blocked_on_.erase(same);
  ranks_.erase(it);
  if (faced < 0) return;
  ranks_[faced].faces = -1, ranks_[faced].guilty = false;
  accuse(faced);
}

void Judge::accuse(int rank) {
  Rank& accuser = ranks_[rank];
  if (accuser.faces >= 0) return;
  const Stuck& a = accuser.stuck;
  for (auto& [group, others] : blocked_on_[operation(a)]) {
    if (group == a.group || !belongs_(rank, group)) continue;
    for (int other : others) {
      Rank& accused = ranks_[other];
      const Stuck& b = accused.stuck;
      if (accused.faces >= 0 || accuser.acquitted.count({other, b.state}) || !belongs_(other, a.group)) continue;
      accuser.faces = other, accused.faces = rank;
      out_.push_back({rank, a.state, other, group, b.key, false});
      out_.push_back({other, b.state, rank, a.group, a.key, false});
      return;
    }
  }
}

void Judge::hear(const Plea& plea) {
  auto it = ranks_.find(plea.rank);
  // An answer to what is no question any more: it has gone on, or the other has.
  if (it == ranks_.end() || it->second.stuck.state != plea.state || it->second.faces != plea.other) return;
  Rank &one = it->second, &other = ranks_[plea.other];
  if (plea.group != other.stuck.group || (one.guilty && other.guilty)) return;
  if (!plea.guilty) {
    one.acquitted.insert({plea.other, other.stuck.state}), other.acquitted.insert({plea.rank, one.stuck.state});
    one.faces = other.faces = -1, one.guilty = other.guilty = false;
    accuse(plea.rank), accuse(plea.other);
    return;
  }
  one.guilty = true;
  if (!other.guilty) return;
  out_.push_back({plea.rank, one.stuck.state, plea.other, other.stuck.group, other.stuck.key, true});
  out_.push_back({plea.other, other.stuck.state, plea.rank, one.stuck.group, one.stuck.key, true});
}

std::vector<Accuse> Judge::take() { return std::exchange(out_, {}); }

}  // namespace lightcc
