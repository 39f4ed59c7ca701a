#include "engine/negotiate/control/deadlock_detector.h"

#include <algorithm>
#include <deque>
#include <utility>

namespace lightcc {

// Automatic names differ between process sets.
DeadlockDetector::Operation DeadlockDetector::operation(const BlockedReport& report) {
  return {report.kind, is_automatic(report.key) ? "" : report.key};
}

void DeadlockDetector::receive(const BlockedReport& report) {
  if (auto it = ranks_.find(report.rank); it != ranks_.end() && it->second.report.state == report.state) {
    it->second.report = report;
    return find_cycle(report.rank);
  }
  withdraw(report.rank);
  if (report.group < 0) return;
  ranks_[report.rank].report = report;
  blocked_on_[operation(report)][report.group].insert(report.rank);
  find_partner(report.rank);
}

void DeadlockDetector::withdraw(int rank) {
  auto it = ranks_.find(rank);
  if (it == ranks_.end()) return;
  const BlockedReport& report = it->second.report;
  const int partner = it->second.partner;
  auto same = blocked_on_.find(operation(report));
  same->second[report.group].erase(rank);
  if (same->second[report.group].empty()) same->second.erase(report.group);
  if (same->second.empty()) blocked_on_.erase(same);
  ranks_.erase(it);
  std::erase_if(asked_cycles_, [&](auto& cycle) { return std::ranges::count(cycle.first, rank) > 0; });
  if (partner < 0) return;
  ranks_[partner].partner = -1;
  ranks_[partner].confirmed = false;
  find_partner(partner);
}

void DeadlockDetector::find_partner(int rank) {
  Rank& one = ranks_[rank];
  if (one.partner >= 0) return;
  const BlockedReport& a = one.report;
  for (auto& [group, others] : blocked_on_[operation(a)]) {
    if (group == a.group || !belongs_(rank, group)) continue;
    for (int other : others) {
      Rank& second = ranks_[other];
      const BlockedReport& b = second.report;
      if (second.partner >= 0 || one.cleared.count({other, b.state}) || !belongs_(other, a.group)) continue;
      one.partner = other;
      second.partner = rank;
      out_.push_back({rank, a.state, other, group, b.key, false});
      out_.push_back({other, b.state, rank, a.group, a.key, false});
      return;
    }
  }
}

void DeadlockDetector::receive(const DeadlockReply& reply) {
  auto it = ranks_.find(reply.rank);
  // An answer to what is no question any more: it has gone on, or the other has.
  if (it == ranks_.end() || it->second.report.state != reply.state || it->second.partner != reply.other) return;
  Rank &one = it->second, &other = ranks_[reply.other];
  if (reply.group != other.report.group || (one.confirmed && other.confirmed)) return;
  if (!reply.deadlocked) {
    one.cleared.insert({reply.other, other.report.state});
    other.cleared.insert({reply.rank, one.report.state});
    one.partner = other.partner = -1;
    one.confirmed = other.confirmed = false;
    find_partner(reply.rank);
    find_partner(reply.other);
    return;
  }
  one.confirmed = true;
  if (!other.confirmed) return;
  out_.push_back({reply.rank, one.report.state, reply.other, other.report.group, other.report.key, true});
  out_.push_back({reply.other, other.report.state, reply.rank, one.report.group, one.report.key, true});
}

std::vector<int> DeadlockDetector::cycle_through(int rank) const {
  std::map<int, int> before;  // of a rank that is waited for: by whom, as the search came there
  for (std::deque<int> next{rank}; !next.empty(); next.pop_front()) {
    for (int other : ranks_.at(next.front()).report.missing) {
      if (!ranks_.contains(other) || !before.try_emplace(other, next.front()).second) continue;
      next.push_back(other);
      if (other != rank) continue;
      std::vector<int> cycle;
      int at = rank;
      do cycle.insert(cycle.begin(), at = before.at(at));
      while (at != rank);
      return cycle;
    }
  }
  return {};
}

// One inside a single set is found there (Coordinator::blocked).
void DeadlockDetector::find_cycle(int rank) {
  std::vector<int> cycle = cycle_through(rank);
  const auto report = [&](int one) -> const BlockedReport& { return ranks_.at(one).report; };
  if (std::ranges::all_of(cycle, [&](int one) { return report(one).group == report(rank).group; })) return;
  std::ranges::rotate(cycle, std::ranges::min_element(cycle));
  const auto [it, is_new] = asked_cycles_.try_emplace(cycle);
  Cycle& known = it->second;
  if (is_new) {
    for (int one : cycle) {
      known.needed.push_back(++ranks_.at(one).asked);
      out_.push_back({one, report(one).state, -1, report(one).group, report(one).key, false});
    }
    return;
  }
  for (size_t i = 0; i < cycle.size(); ++i)
    if (report(cycle[i]).answers < known.needed[i]) return;
  if (!std::exchange(known.told, true)) cycles_.push_back(std::move(cycle));
}

std::vector<std::vector<int>> DeadlockDetector::take_cycles() { return std::exchange(cycles_, {}); }

std::vector<DeadlockProbe> DeadlockDetector::take_messages() { return std::exchange(out_, {}); }

}  // namespace lightcc
