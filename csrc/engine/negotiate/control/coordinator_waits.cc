// What the coordinator knows of who waits for whom, and why: for the warnings of stalls and deadlocks.
#include <algorithm>

#include "engine/negotiate/control/coordinator.h"

namespace lightcc {
namespace {

constexpr size_t kRefusedKept = 256;  // keys of which refusals are remembered

}  // namespace

void Coordinator::refused(int member, const std::string& key, const std::string& why) {
  if (auto it = entries_.find(key); it != entries_.end()) end_plan_of(it->second);
  if (refused_.size() >= kRefusedKept && !refused_.count(key)) return;
  auto& by_member = refused_[key];
  by_member.resize(rank_of_.size());
  ++by_member[size_t(member)].count;
  by_member[size_t(member)].why = why;
  const auto none = [](const Refusal& refusal) { return refusal.count == 0; };
  if (std::any_of(by_member.begin(), by_member.end(), none)) return;
  for (Refusal& refusal : by_member) --refusal.count;  // all have refused it: nobody waits for them
  if (std::all_of(by_member.begin(), by_member.end(), none)) refused_.erase(key);
}

std::string Coordinator::refusal(int member, const std::string& key) const {
  auto it = refused_.find(key);
  return it == refused_.end() || it->second[size_t(member)].count == 0 ? "" : it->second[size_t(member)].why;
}

std::string Coordinator::waits_for(int member) const {
  const Entry* first = nullptr;
  for (auto& [key, e] : entries_) {
    if (e.announced.empty() || !has_announced(e, member) || is_ready(e) || e.what[size_t(member)].kind == Kind::join)
      continue;
    if (!first || e.last_used < first->last_used) first = &e;
  }
  return first ? first->key : "";
}

// What members are blocked on. A member that has got it in the meantime has announced nothing since, but it has run.
std::map<std::string, Wait> Coordinator::waits() const {
  std::map<std::string, Wait> waits;
  for (auto& [member, key] : cycles_.blocked_on) {
    auto it = entries_.find(key);
    if (it != entries_.end() && has_announced(it->second, member) && !is_ready(it->second))
      waits[key].members.push_back(member);
  }
  for (auto& [key, wait] : waits) wait.key = key, wait.missing = missing(key);
  return waits;
}

std::vector<Wait> Coordinator::blocked(int member, const std::string& key) {
  cycles_.blocked_on[member] = key;
  const std::vector<int> late = missing(key);
  if (std::none_of(late.begin(), late.end(), [&](int one) { return cycles_.blocked_on.contains(one); })) return {};
  const std::map<std::string, Wait> waits = this->waits();
  std::erase_if(cycles_.told, [&](const std::string& told) { return !waits.contains(told); });
  std::vector<Wait> cycle = find_cycle(waits, key);
  bool is_news = false;
  for (const Wait& wait : cycle) is_news |= cycles_.told.insert(wait.key).second;
  return is_news ? cycle : std::vector<Wait>();
}

std::vector<int> Coordinator::missing(const std::string& key) const {
  std::vector<int> members;
  auto it = entries_.find(key);
  for (int i = 0; i < int(rank_of_.size()); ++i)
    if (!joined_.is[i] && (it == entries_.end() || it->second.announced.empty() || !has_announced(it->second, i)))
      members.push_back(i);
  return members;
}

std::vector<int> Coordinator::joined() const {
  std::vector<int> members;
  for (int i = 0; i < int(rank_of_.size()); ++i)
    if (joined_.is[i]) members.push_back(i);
  return members;
}

}  // namespace lightcc
