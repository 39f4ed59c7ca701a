#include "engine/relay.h"

#include <algorithm>
#include <utility>

namespace lightcc {
namespace {

const std::string kJoinKey = std::string(name_of(Kind::join)) + ".";

[[noreturn]] void refuse(const std::string& what) { throw Error(Code::internal, "a relay was sent " + what); }

// Ranges ascend and do not touch (message.cc).
void check_places(const std::vector<int32_t>& places, int size) {
  if (places.empty() || places.size() % 2 || places.front() < 0 || places.back() >= size)
    throw Error(Code::internal, "a relay speaks for members that are not below it");
}

template <class Each>
void for_places(const std::vector<int32_t>& places, Each each) {
  for (size_t i = 0; i < places.size(); i += 2)
    for (int32_t place = places[i]; place <= places[i + 1]; ++place) each(size_t(place));
}

// Both ascend and have nothing in common; so does what comes out.
std::vector<int32_t> united(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  std::vector<int32_t> all;
  for (size_t i = 0, j = 0; i < a.size() || j < b.size();) {
    const bool left = j == b.size() || (i < a.size() && a[i] < b[j]);
    const auto& from = left ? a : b;
    size_t& at = left ? i : j;
    if (!all.empty() && all.back() + 1 == from[at])
      all.back() = from[at + 1];
    else
      all.insert(all.end(), {from[at], from[at + 1]});
    at += 2;
  }
  return all;
}

}  // namespace

void each_said(const Said& said, const std::vector<int>& below,
               const std::function<void(int member, const std::variant<Announce, Recall>&)>& each) {
  for (const Part& part : said.parts) {
    check_places(part.places, int(below.size()));
    for_places(part.places, [&](size_t place) { each(below[place], part.said); });
  }
}

Relay::Relay(const Tree& tree) : tree_(tree), joined_(tree.subtree.size()) {
  int first = 1;  // behind this member
  for (auto& members : tree.below) first_.push_back(first), first += int(members.size());
}

void Relay::hear(int child, Message message, uint64_t now_ns) {
  const int32_t first = child == kSelf ? 0 : first_[size_t(child)];
  auto below = [&](int member) {
    if (child == kSelf ? member != tree_.subtree[0] : tree_.toward(member) != child)
      refuse("a message of a member that is not below its sender");
  };
  if (auto* announce = std::get_if<Announce>(&message)) return gather({{first, first}, std::move(*announce)}, now_ns);
  if (auto* recall = std::get_if<Recall>(&message)) return gather({{first, first}, *recall}, now_ns);
  if (auto* said = std::get_if<Said>(&message)) {
    if (child == kSelf) refuse("by itself what others have said");
    for (Part& part : said->parts) {
      check_places(part.places, int(tree_.below[size_t(child)].size()));
      for (int32_t& place : part.places) place += first;
      gather(std::move(part), now_ns);
    }
    return;
  }
  if (auto* query = std::get_if<Query>(&message)) below(query->member);
  if (auto* stuck = std::get_if<Stuck>(&message)) below(stuck->rank);
  if (auto* plea = std::get_if<Plea>(&message)) below(plea->rank);
  // A goodbye may be of anyone whose leaving the sender has seen.
  if (std::holds_alternative<Batch>(message) || std::holds_alternative<Failure>(message) ||
      std::holds_alternative<Missing>(message) || std::holds_alternative<Accuse>(message))
    refuse("by a child a message that only coordinators send");
  hurry();
  out_.push_back(std::move(message));
}

void Relay::gather(Part part, uint64_t now_ns) {
  const auto* announce = std::get_if<Announce>(&part.said);
  std::string key;
  if (announce) {
    key = announce->key;
  } else {
    const Recall& recall = std::get<Recall>(part.said);
    auto known = known_.find(recall.id);
    // A number that was given away: the coordinator counts that.
    if (known == known_.end() || known->second.generation != recall.generation)
      return out_.push_back(Said{{std::move(part)}});
    key = known->second.key;
  }
  if (key == kJoinKey) return join(std::move(part));
  if (passing_) return out_.push_back(Said{{std::move(part)}});

  Entry& entry = entries_[key];
  entry.state.resize(joined_.size());
  // Who speaks again has been told of a failure that passed here before what it had said came here.
  bool hold = !(announce && announce->again), twice = false;
  for_places(part.places, [&](size_t place) {
    hold = hold && entry.state[place] == State::silent;
    twice = twice || entry.state[place] == State::held;
  });
  if (twice) pass(entry);
  if (auto it = contested_.find(key); it != contested_.end())
    for_places(part.places, [&](size_t place) { hold = !std::exchange(it->second[place], 0) && hold; });
  for_places(part.places, [&](size_t place) {
    entry.count += entry.state[place] == State::silent;
    entry.state[place] = hold ? State::held : State::passed;
  });
  if (!hold) {
    out_.push_back(Said{{std::move(part)}});
  } else {
    if (entry.held.empty()) entry.since_ns = now_ns, due_ns_ = std::min(due_ns_, now_ns + kHoldNs);
    auto same = std::find_if(entry.held.begin(), entry.held.end(), [&](Part& one) { return one.said == part.said; });
    if (same == entry.held.end())
      entry.held.push_back(std::move(part));
    else
      same->places = united(same->places, part.places);
  }
  if (!complete(entry)) return;
  pass(entry);
  entries_.erase(key);
}

// First what these members have said, then what was waiting only for them, and then that they join.
void Relay::join(Part part) {
  for (auto& [other, entry] : entries_) {
    bool speaks = false;
    for_places(part.places, [&](size_t place) { speaks |= entry.state[place] == State::held; });
    if (speaks) pass(entry);
  }
  for_places(part.places, [&](size_t place) { joined_count_ += !std::exchange(joined_[place], 1); });
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (!complete(it->second)) {
      ++it;
      continue;
    }
    pass(it->second);
    it = entries_.erase(it);
  }
  out_.push_back(Said{{std::move(part)}});
}

void Relay::pass(Entry& entry) {
  if (entry.held.empty()) return;
  for (const Part& part : entry.held)
    for_places(part.places, [&](size_t place) { entry.state[place] = State::passed; });
  out_.push_back(Said{std::exchange(entry.held, {})});
}

bool Relay::complete(const Entry& entry) const {
  if (entry.count == int(joined_.size())) return true;
  if (joined_count_ == 0) return false;
  for (size_t i = 0; i < joined_.size(); ++i)
    if (entry.state[i] == State::silent && !joined_[i]) return false;
  return true;
}

void Relay::tell(const Message& message) {
  auto settle = [&](const std::string& key) {
    if (auto it = entries_.find(key); it != entries_.end()) {
      pass(it->second);
      entries_.erase(it);
    }
  };
  if (auto* batch = std::get_if<Batch>(&message)) {
    for (const Item& item : batch->items) {
      auto known = known_.find(item.id);
      if (!item.fresh && known == known_.end()) refuse("a number that stands for nothing");
      const std::string key = item.fresh ? item.key : known->second.key;
      settle(key);
      if (item.fresh && item.id != kNoId) {
        // Whoever recalled what had this number before has said nothing; it must be known before that is made good.
        if (known != known_.end() && known->second.key != key) settle(known->second.key);
        known_[item.id] = {key, item.generation};
      }
      if (key == kJoinKey) std::fill(joined_.begin(), joined_.end(), 0), joined_count_ = 0, contested_.clear();
    }
  } else if (auto* failure = std::get_if<Failure>(&message)) {
    settle(failure->key);  // those that it was for may announce it anew
    if (failure->absent.empty()) return;
    auto& contested = contested_[failure->key];
    contested.resize(joined_.size());
    for (size_t place = 0; place < contested.size(); ++place)
      contested[place] |=
          std::find(failure->only.begin(), failure->only.end(), tree_.subtree[place]) == failure->only.end();
  }
}

void Relay::gone() {
  hurry();
  passing_ = true;
  entries_.clear();
}

void Relay::hurry() {
  for (auto& [key, entry] : entries_) pass(entry);
  due_ns_ = UINT64_MAX;
}

void Relay::look(uint64_t now_ns) {
  if (now_ns < due_ns_) return;
  due_ns_ = UINT64_MAX;
  for (auto& [key, entry] : entries_) {
    if (entry.held.empty()) continue;
    if (now_ns >= entry.since_ns + kHoldNs)
      pass(entry);
    else
      due_ns_ = std::min(due_ns_, entry.since_ns + kHoldNs);
  }
}

std::vector<Message> Relay::take() { return std::exchange(out_, {}); }

}  // namespace lightcc
