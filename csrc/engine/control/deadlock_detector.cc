#include "engine/control/deadlock_detector.h"

#include <utility>

namespace lightcc {

// Automatic names differ between process sets.
DeadlockDetector::Operation DeadlockDetector::operation(const BlockedReport& report) {
  return {report.kind, is_automatic(report.key) ? "" : report.key};
}

void DeadlockDetector::receive(const BlockedReport& report) {
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

std::vector<DeadlockProbe> DeadlockDetector::take_messages() { return std::exchange(out_, {}); }

}  // namespace lightcc
