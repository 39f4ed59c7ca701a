#include "engine/negotiate/control/aggregator.h"

#include <algorithm>
#include <utility>

#include "base/overloaded.h"
#include "engine/negotiate/control/hold.h"

namespace lightcc {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(Code::internal, "an aggregator was sent " + what); }

// Ranges ascend and do not touch (message.cc).
void check_positions(const std::vector<int32_t>& positions, int size) {
  if (positions.empty() || positions.size() % 2 || positions.front() < 0 || positions.back() >= size)
    throw Error(Code::internal, "an aggregator sent a request of members that are not below it");
}

template <class Each>
void for_positions(const std::vector<int32_t>& positions, Each each) {
  for (size_t i = 0; i < positions.size(); i += 2)
    for (int32_t position = positions[i]; position <= positions[i + 1]; ++position) each(size_t(position));
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

// What a bucket's readiness is held under; no request's key begins so.
std::string key_of(uint32_t plan, uint32_t bucket) {
  return "=" + std::to_string(plan) + "." + std::to_string(bucket);
}

}  // namespace

void for_each_request(const AggregatedRequests& aggregated, const std::vector<int>& below,
                      const std::function<void(int member, const Readiness&)>& each) {
  for (const AggregatedRequest& gathered : aggregated.requests) {
    check_positions(gathered.positions, int(below.size()));
    for_positions(gathered.positions, [&](size_t position) { each(below[position], gathered.request); });
  }
}

Aggregator::Aggregator(const Tree& tree) : tree_(tree), joined_(tree.subtree.size()) {
  int first = 1;  // behind this member
  for (auto& members : tree.below) first_.push_back(first), first += int(members.size());
}

void Aggregator::receive_up(int child, UpMessage message, uint64_t now_ns) {
  const int32_t first = child == kSelf ? 0 : first_[size_t(child)];
  if (auto* announce = std::get_if<Announce>(&message)) return gather({{first, first}, std::move(*announce)}, now_ns);
  if (auto* cached = std::get_if<CachedRequest>(&message)) return gather({{first, first}, *cached}, now_ns);
  if (auto* bucket = std::get_if<BucketReady>(&message)) return gather({{first, first}, *bucket}, now_ns);
  if (const auto sender = named_sender(message))
    if (child == kSelf ? *sender != tree_.subtree[0] : tree_.toward(*sender) != child)
      refuse("a message of a member that is not below its sender");
  // These are about nothing that is held.
  if (!std::holds_alternative<LaunchRequest>(message) && !std::holds_alternative<RankReport>(message)) pass_all();
  out_.push_back(std::move(message));
}

void Aggregator::receive_up(int child, AggregatedRequests aggregated, uint64_t now_ns) {
  if (child == kSelf) refuse("by itself what others have announced");
  for (AggregatedRequest& gathered : aggregated.requests) {
    check_positions(gathered.positions, int(tree_.below[size_t(child)].size()));
    for (int32_t& position : gathered.positions) position += first_[size_t(child)];
    gather(std::move(gathered), now_ns);
  }
}

void Aggregator::gather(AggregatedRequest gathered, uint64_t now_ns) {
  const auto* announce = std::get_if<Announce>(&gathered.request);
  std::string key;
  if (announce) {
    key = announce->key;
  } else if (auto* bucket = std::get_if<BucketReady>(&gathered.request)) {
    // The plan has ended: the coordinator takes the word for its requests.
    if (!plans_.contains(bucket->plan)) return out_.push_back(AggregatedRequests{{std::move(gathered)}});
    key = key_of(bucket->plan, bucket->bucket);
  } else {
    const CachedRequest& cached = std::get<CachedRequest>(gathered.request);
    auto numbered = numbered_.find(cached.id);
    // A number that was given away: the coordinator counts that.
    if (numbered == numbered_.end() || numbered->second.generation != cached.generation)
      return out_.push_back(AggregatedRequests{{std::move(gathered)}});
    key = numbered->second.key;
  }
  if (key == kJoinKey) return join(std::move(gathered));
  if (passes_all_ || passing_.contains(key)) return out_.push_back(AggregatedRequests{{std::move(gathered)}});

  Entry& entry = entries_[key];
  entry.state.resize(joined_.size());
  // A member that announces it again has been told of a failure that passed here before its announcement came.
  bool hold = !(announce && announce->again), twice = false;
  for_positions(gathered.positions, [&](size_t position) {
    hold = hold && entry.state[position] == State::silent;
    twice = twice || entry.state[position] == State::held;
  });
  if (twice) pass(entry);
  if (auto it = absent_.find(key); it != absent_.end())
    for_positions(gathered.positions, [&](size_t position) { hold = !std::exchange(it->second[position], 0) && hold; });
  for_positions(gathered.positions, [&](size_t position) {
    entry.count += entry.state[position] == State::silent;
    entry.state[position] = hold ? State::held : State::passed;
  });
  if (!hold) {
    out_.push_back(AggregatedRequests{{std::move(gathered)}});
  } else {
    if (entry.held.empty()) {
      entry.since_ns = now_ns;
      due_ns_ = std::min(due_ns_, now_ns + hold::kAggregatorNs);
    }
    auto same = std::find_if(entry.held.begin(), entry.held.end(),
                             [&](AggregatedRequest& one) { return one.request == gathered.request; });
    if (same == entry.held.end())
      entry.held.push_back(std::move(gathered));
    else
      same->positions = united(same->positions, gathered.positions);
  }
  // A member that sends a planned request by itself has left the plan, and what others have said by it must not wait
  // here.
  if (planned_.contains(key)) pass_all();
  if (!complete(entry)) return;
  pass(entry);
  entries_.erase(key);
}

// First what these members have announced, then what was waiting only for them, and then that they join.
void Aggregator::join(AggregatedRequest gathered) {
  for (auto& [other, entry] : entries_) {
    bool speaks = false;
    for_positions(gathered.positions, [&](size_t position) { speaks |= entry.state[position] == State::held; });
    if (speaks) pass(entry);
  }
  for_positions(gathered.positions, [&](size_t position) { joined_count_ += !std::exchange(joined_[position], 1); });
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (!complete(it->second)) {
      ++it;
      continue;
    }
    pass(it->second);
    it = entries_.erase(it);
  }
  out_.push_back(AggregatedRequests{{std::move(gathered)}});
}

void Aggregator::pass(Entry& entry) {
  if (entry.held.empty()) return;
  for (const AggregatedRequest& gathered : entry.held)
    for_positions(gathered.positions, [&](size_t position) { entry.state[position] = State::passed; });
  out_.push_back(AggregatedRequests{std::exchange(entry.held, {})});
}

bool Aggregator::complete(const Entry& entry) const {
  if (entry.count == int(joined_.size())) return true;
  if (joined_count_ == 0) return false;
  for (size_t i = 0; i < joined_.size(); ++i)
    if (entry.state[i] == State::silent && !joined_[i]) return false;
  return true;
}

void Aggregator::receive_down(const DownMessage& message) {
  std::visit(Overloaded{[&](const Batch& batch) { release(batch); }, [&](const Failure& failure) { release(failure); },
                        [&](const Plan& plan) { begin(plan); }, [&](const PlanEnded& ended) { end(ended.plan); },
                        [&](const BucketBatch& batch) { release(key_of(batch.plan, batch.bucket)); },
                        [&](const NameWithdrawn& withdrawn) { release(withdrawn.key); },
                        [](const Tuned&) {}, [](const Missing&) {}, [](const DeadlockProbe&) {},
                        [](const LaunchTurn&) {}},
             message);
}

void Aggregator::release(const std::string& key) {
  passing_.erase(key);
  auto it = entries_.find(key);
  if (it == entries_.end()) return;
  pass(it->second);
  entries_.erase(it);
}

void Aggregator::release(const Batch& batch) {
  for (const Response& response : batch.responses) {
    auto numbered = numbered_.find(response.id);
    if (!response.fresh && numbered == numbered_.end()) refuse("a number that stands for nothing");
    const std::string key = response.fresh ? response.key : numbered->second.key;
    release(key);
    if (response.fresh && response.id != kNoId) {
      // A cached request by this number that is held means the request that had it before: it must reach the
      // coordinator before the announcement that repeats it in full.
      if (numbered != numbered_.end() && numbered->second.key != key) release(numbered->second.key);
      numbered_[response.id] = {key, response.generation};
    }
    if (key != kJoinKey) continue;
    std::fill(joined_.begin(), joined_.end(), 0);
    joined_count_ = 0;
    absent_.clear();
  }
}

void Aggregator::begin(const Plan& plan) {
  std::vector<std::string>& keys = plans_[plan.plan];
  for (auto& bucket : plan.buckets)
    for (uint32_t id : bucket) {
      auto numbered = numbered_.find(id);
      if (numbered == numbered_.end()) refuse("a plan with a number that stands for nothing");
      keys.push_back(numbered->second.key);
      planned_.insert(keys.back());
    }
}

// What members still say by it passes at once.
void Aggregator::end(uint32_t plan) {
  auto it = plans_.find(plan);
  if (it == plans_.end()) return;
  for (const std::string& key : it->second) {
    planned_.erase(key);
    passing_.insert(key);
  }
  plans_.erase(it);
  pass_all();
  const std::string prefix = "=" + std::to_string(plan) + ".";
  std::erase_if(entries_, [&](const auto& one) { return one.first.starts_with(prefix); });
}

void Aggregator::release(const Failure& failure) {
  release(failure.key);  // those that it was for may announce it anew
  if (failure.absent.empty()) return;
  auto& absent = absent_[failure.key];
  absent.resize(joined_.size());
  for (size_t position = 0; position < absent.size(); ++position)
    absent[position] |=
        std::find(failure.only.begin(), failure.only.end(), tree_.subtree[position]) == failure.only.end();
}

void Aggregator::member_left() {
  pass_all();
  passes_all_ = true;
  entries_.clear();
}

void Aggregator::pass_all() {
  for (auto& [key, entry] : entries_) pass(entry);
  due_ns_ = UINT64_MAX;
}

void Aggregator::pass_expired(uint64_t now_ns) {
  if (now_ns < due_ns_) return;
  due_ns_ = UINT64_MAX;
  for (auto& [key, entry] : entries_) {
    if (entry.held.empty()) continue;
    if (now_ns >= entry.since_ns + hold::kAggregatorNs)
      pass(entry);
    else
      due_ns_ = std::min(due_ns_, entry.since_ns + hold::kAggregatorNs);
  }
}

std::vector<UpFrame> Aggregator::take_frames() { return std::exchange(out_, {}); }

}  // namespace lightcc
